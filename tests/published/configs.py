"""What the config.json and generation_config.json of published checkpoints say.

Sizes are the published ones; `folder.small` divides them. "@<pad>" is the id of this token, and
"@+28" the number of tokens and 28 more.
"""

import json


def values(text, *bases):
    """Return the values of JSON without its braces, over those of other configs."""
    whole = {}
    for base in bases:
        whole |= base
    return whole | json.loads("{" + text + "}")


def sizes(d_model, layers, ffn, heads, positions, decoder_layers=None):
    sides = {"encoder": layers, "decoder": decoder_layers or layers}
    return {
        "d_model": d_model,
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        **{f"{side}_layers": count for side, count in sides.items()},
        **{f"{side}_ffn_dim": ffn for side in sides},
        **{f"{side}_attention_heads": heads for side in sides},
    }


# Written as the files are.
# fmt: off
LABELS = values("""
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}""")
LINEAGE = values("""
    "activation_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 2,
    "pad_token_id": 1, "decoder_layerdrop": 0.0, "encoder_layerdrop": 0.0, "dropout": 0.1,
    "init_std": 0.02, "is_encoder_decoder": true, "use_cache": true, "vocab_size": "@+0" """)
IDS = '"bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1'
BASE, LARGE = sizes(768, 6, 3072, 12, 1024), sizes(1024, 12, 4096, 16, 1024)

OPUS_2020 = values("""
    "activation_function": "swish", "add_bias_logits": false, "add_final_layer_norm": false,
    "architectures": ["MarianMTModel"], "bad_words_ids": [["@<pad>"]], "classif_dropout": 0.0,
    "decoder_start_token_id": "@<pad>", "eos_token_id": 0, "max_length": 512,
    "model_type": "marian", "normalize_before": false, "normalize_embedding": false,
    "num_beams": 6, "pad_token_id": "@<pad>", "scale_embedding": true,
    "static_position_embeddings": true""", LINEAGE, LABELS, sizes(512, 6, 2048, 8, 512))
OPUS = values("""
    "_num_labels": 3, "decoder_vocab_size": "@+0", "forced_eos_token_id": 0, "num_beams": 4,
    "gradient_checkpointing": false, "share_encoder_decoder_embeddings": true,
    "transformers_version": "4.22.0.dev0" """, OPUS_2020)
OPUS_GENERATION = values("""
    "bad_words_ids": [["@<pad>"]], "bos_token_id": 0, "decoder_start_token_id": "@<pad>",
    "eos_token_id": 0, "forced_eos_token_id": 0, "max_length": 512, "num_beams": 4,
    "pad_token_id": "@<pad>", "renormalize_logits": true, "transformers_version": "4.22.0.dev0" """)
ONE_MORE = {"vocab_size": "@+1", "decoder_vocab_size": "@+1"}
TC_BIG = values("""
    "activation_function": "relu", "architectures": ["MarianMTModel"],
    "bad_words_ids": [["@<pad>"]], "classifier_dropout": 0.0, "decoder_start_token_id": "@<pad>",
    "decoder_vocab_size": "@+0", "eos_token_id": "@</s>", "forced_eos_token_id": "@</s>",
    "max_length": 512, "model_type": "marian", "normalize_embedding": false, "num_beams": 4,
    "pad_token_id": "@<pad>", "scale_embedding": true, "share_encoder_decoder_embeddings": true,
    "static_position_embeddings": true, "torch_dtype": "float16", "transformers_version": "4.18.0"
    """, LINEAGE, sizes(1024, 6, 4096, 16, 1024))
TC_GENERATION = OPUS_GENERATION | {"eos_token_id": "@</s>", "forced_eos_token_id": "@</s>"}
SEPARATE = values("""
    "share_encoder_decoder_embeddings": false, "torch_dtype": "float32", "eos_token_id": 0,
    "forced_eos_token_id": 0""", TC_BIG)

BART = values("""
    "activation_dropout": 0.1, "activation_function": "gelu", "add_bias_logits": false,
    "add_final_layer_norm": false, "architectures": ["BartModel"], "attention_dropout": 0.1,
    "classif_dropout": 0.1, "classifier_dropout": 0.0, "decoder_start_token_id": 2,
    "early_stopping": true, "forced_eos_token_id": 2, "gradient_checkpointing": false,
    "model_type": "bart", "no_repeat_ngram_size": 3, "normalize_before": false, "num_beams": 4,
    "scale_embedding": false, "task_specific_params": {"summarization": {"length_penalty": 1.0,
    "max_length": 128, "min_length": 12, "num_beams": 4}}""", LINEAGE, LABELS)
BART_BASE = values('"forced_bos_token_id": 0, "normalize_embedding": true', BART, BASE)
BART_LARGE = values("""
    "architectures":
    ["BartModel", "BartForConditionalGeneration", "BartForSequenceClassification"]""", BART, LARGE)
CNN = values("""
    "_num_labels": 3, "activation_dropout": 0.0,
    "architectures": ["BartForConditionalGeneration"], "attention_dropout": 0.0,
    "classif_dropout": 0.0, "force_bos_token_to_be_generated": true, "forced_bos_token_id": 0,
    "length_penalty": 2.0, "max_length": 142, "min_length": 56, "output_past": true,
    "prefix": " ", "vocab_size": "@-1" """, BART, LARGE)
SUMMARY = values(f"""
    "_from_model_config": true, {IDS}, "early_stopping": true, "forced_bos_token_id": 0,
    "forced_eos_token_id": 2, "length_penalty": 2.0, "max_length": 142, "min_length": 56,
    "no_repeat_ngram_size": 3, "num_beams": 4, "transformers_version": "4.27.0.dev0" """)
XSUM = values('"length_penalty": 1.0, "max_length": 62, "min_length": 11, "num_beams": 6')
DISTILBART = values('"decoder_layers": 6, "extra_pos_embeddings": 2', CNN)
MNLI = values("""
    "_num_labels": 3, "activation_dropout": 0.0, "attention_dropout": 0.0,
    "architectures": ["BartForSequenceClassification"], "finetuning_task": "mnli",
    "id2label": {"0": "contradiction", "1": "neutral", "2": "entailment"},
    "label2id": {"contradiction": 0, "neutral": 1, "entailment": 2}""", BART, LARGE)
CHINESE = values("""
    "bos_token_id": "@[CLS]", "decoder_start_token_id": "@[SEP]", "eos_token_id": "@[SEP]",
    "forced_eos_token_id": "@[SEP]", "normalize_embedding": true, "pad_token_id": "@[PAD]",
    "tokenizer_class": "BertTokenizer" """, BART, sizes(768, 6, 3072, 12, 512))
KOBART = values("""
    "activation_function": "gelu", "add_bias_logits": false, "add_final_layer_norm": false,
    "architectures": ["BartModel"], "bos_token_id": 1, "classif_dropout": 0.1,
    "classifier_dropout": 0.1, "decoder_start_token_id": 1, "do_blenderbot_90_layernorm": false,
    "eos_token_id": 1, "extra_pos_embeddings": 2, "force_bos_token_to_be_generated": false,
    "forced_eos_token_id": 1, "gradient_checkpointing": false, "kobart_version": 2.0,
    "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1},
    "model_type": "bart", "normalize_before": false, "normalize_embedding": true,
    "pad_token_id": 3, "scale_embedding": false, "static_position_embeddings": false,
    "tokenizer_class": "PreTrainedTokenizerFast" """, LINEAGE, sizes(768, 6, 3072, 16, 1026))
MVP = values("""
    "activation_function": "gelu", "architectures": ["MvpForConditionalGeneration"],
    "attention_dropout": 0.1, "activation_dropout": 0.1, "classifier_dropout": 0.0,
    "decoder_start_token_id": 2, "early_stopping": true, "forced_eos_token_id": 2,
    "model_type": "mvp", "no_repeat_ngram_size": 3, "num_beams": 5, "prompt_length": 100,
    "prompt_mid_dim": 800, "scale_embedding": false, "use_prompt": false, "vocab_size": "@+2"
    """, LINEAGE, LARGE)

CC25 = values("""
    "_num_labels": 3, "activation_function": "gelu", "add_bias_logits": false,
    "add_final_layer_norm": true, "architectures": ["MBartForConditionalGeneration"],
    "classif_dropout": 0.0, "max_length": 1024, "model_type": "mbart", "normalize_before": true,
    "normalize_embedding": true, "num_beams": 5, "output_past": true, "scale_embedding": true,
    "static_position_embeddings": false, "task_specific_params": {"translation_en_to_ro":
    {"decoder_start_token_id": 250020}}""", LINEAGE, LABELS, LARGE)
MBART_50 = values("""
    "classifier_dropout": 0.0, "decoder_start_token_id": 2, "early_stopping": true,
    "forced_eos_token_id": 2, "gradient_checkpointing": false, "max_length": 200,
    "tokenizer_class": "MBart50Tokenizer" """, CC25)
ML50 = values('"activation_function": "relu"', MBART_50)
ML50_GENERATION = values(f"""
    "_from_model_config": true, {IDS}, "early_stopping": true, "forced_eos_token_id": 2,
    "max_length": 200, "num_beams": 5, "transformers_version": "4.27.0.dev0" """)
FORCED_EN = {"forced_bos_token_id": "@en_XX"}
BARTHEZ = values("""
    "activation_dropout": 0.1, "activation_function": "gelu", "add_bias_logits": false,
    "add_final_layer_norm": true, "architectures": ["MBartModel"], "attention_dropout": 0.1,
    "classif_dropout": 0.1, "classifier_dropout": 0.0, "decoder_start_token_id": 2,
    "do_blenderbot_90_layernorm": false, "early_stopping": true, "extra_pos_embeddings": 2,
    "force_bos_token_to_be_generated": false, "gradient_checkpointing": false,
    "model_type": "mbart", "no_repeat_ngram_size": 3, "normalize_before": true,
    "normalize_embedding": true, "num_beams": 4, "scale_embedding": false,
    "static_position_embeddings": false, "tokenizer_class": "BarthezTokenizer" """, LINEAGE, BASE)
BARTPHO = values('"architectures": ["MBartModel"], "tokenizer_class": "BartphoTokenizer"', CC25)

M2M100 = values("""
    "activation_function": "relu", "architectures": ["M2M100ForConditionalGeneration"],
    "attention_dropout": 0.1, "decoder_layerdrop": 0.05, "decoder_start_token_id": 2,
    "early_stopping": true, "encoder_layerdrop": 0.05, "gradient_checkpointing": false,
    "max_length": 200, "model_type": "m2m_100", "num_beams": 5, "scale_embedding": true
    """, LINEAGE, LARGE)
M2M100_LARGE = M2M100 | sizes(1024, 24, 8192, 16, 1024)
WMT21 = M2M100 | sizes(2048, 24, 16384, 32, 1024)
M2M100_GENERATION = values(f"""
    "_from_model_config": true, {IDS}, "early_stopping": true, "max_length": 200, "num_beams": 5""")
NLLB = values("""
    "activation_function": "relu", "architectures": ["M2M100ForConditionalGeneration"],
    "attention_dropout": 0.1, "decoder_layerdrop": 0, "decoder_start_token_id": 2,
    "encoder_layerdrop": 0, "model_type": "m2m_100", "scale_embedding": true,
    "torch_dtype": "float32", "transformers_version": "4.21.0.dev0", "vocab_size": "@+2"
    """, LINEAGE, LARGE)
NLLB_LARGE = NLLB | sizes(1024, 24, 8192, 16, 1024)
NLLB_WIDE = NLLB | sizes(2048, 24, 8192, 16, 1024)
NLLB_GENERATION = values(f'"_from_model_config": true, {IDS}, "max_length": 200')

PEGASUS = values("""
    "activation_dropout": 0.1, "activation_function": "relu", "add_bias_logits": false,
    "add_final_layer_norm": true, "architectures": ["PegasusForConditionalGeneration"],
    "attention_dropout": 0.1, "classif_dropout": 0.0, "classifier_dropout": 0.0,
    "decoder_start_token_id": 0, "eos_token_id": 1, "extra_pos_embeddings": 1,
    "force_bos_token_to_be_generated": false, "forced_eos_token_id": 1,
    "gradient_checkpointing": false, "length_penalty": 0.8, "max_length": 256,
    "model_type": "pegasus", "normalize_before": true, "normalize_embedding": false,
    "num_beams": 8, "pad_token_id": 0, "scale_embedding": true, "static_position_embeddings": true,
    "task_specific_params": {"summarization_xsum": {"length_penalty": 0.8, "max_length": 64}}
    """, LINEAGE, LABELS, sizes(1024, 16, 4096, 16, 1024))
PEGASUS_XSUM = values(
    '"length_penalty": 0.6, "max_length": 64, "max_position_embeddings": 512', PEGASUS)
PARAPHRASE = values('"max_length": 60, "max_position_embeddings": 60', PEGASUS)
PEGASUS_GENERATION = values("""
    "_from_model_config": true, "bos_token_id": 0, "decoder_start_token_id": 0,
    "eos_token_id": 1, "forced_eos_token_id": 1, "length_penalty": 0.6, "max_length": 64,
    "num_beams": 8, "pad_token_id": 0, "transformers_version": "4.27.0.dev0" """)
BLENDERBOT = values("""
    "activation_function": "gelu", "add_bias_logits": false, "add_final_layer_norm": true,
    "architectures": ["BlenderbotForConditionalGeneration"], "bos_token_id": 1,
    "classif_dropout": 0.0, "decoder_start_token_id": 1, "do_blenderbot_90_layernorm": true,
    "encoder_no_repeat_ngram_size": 3, "extra_pos_embeddings": 0,
    "force_bos_token_to_be_generated": false, "forced_eos_token_id": 2,
    "layernorm_variant": "prelayernorm", "length_penalty": 0.65, "max_length": 60,
    "min_length": 20, "model_type": "blenderbot", "no_repeat_ngram_size": 3,
    "normalize_before": true, "normalize_embedding": false, "num_beams": 10, "pad_token_id": 0,
    "scale_embedding": true, "static_position_embeddings": false, "unk_token_id": 3
    """, LINEAGE, LABELS, sizes(1280, 2, 5120, 32, 128, 12))
BLENDERBOT_3B = BLENDERBOT | sizes(2560, 2, 10240, 32, 128, 24)
PLBART = values("""
    "activation_dropout": 0.1, "activation_function": "gelu", "attention_dropout": 0.1,
    "architectures": ["PLBartForConditionalGeneration"], "classifier_dropout": 0.0,
    "forced_eos_token_id": 2, "model_type": "plbart", "scale_embedding": true""", LINEAGE, BASE)

T5_COMMON = values("""
    "architectures": ["T5ForConditionalGeneration"], "d_kv": 64, "decoder_start_token_id": 0,
    "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": true,
    "layer_norm_epsilon": 1e-06, "model_type": "t5", "output_past": true, "pad_token_id": 0,
    "relative_attention_num_buckets": 32, "use_cache": true, "vocab_size": "@+28" """)
T5_SMALL = values("""
    "d_ff": 2048, "d_model": 512, "n_positions": 512, "num_heads": 8, "num_layers": 6,
    "num_decoder_layers": 6, "task_specific_params": {"summarization": {"early_stopping": true,
    "length_penalty": 2.0, "max_length": 200, "min_length": 30, "no_repeat_ngram_size": 3,
    "num_beams": 4, "prefix": "summarize: "}}""", T5_COMMON)
TWELVE = {"num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "d_model": 768}
T5_BASE = T5_SMALL | TWELVE | {"d_ff": 3072}
V1_1 = values("""
    "d_ff": 1024, "d_model": 512, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 8,
    "num_heads": 6, "num_layers": 8, "tie_word_embeddings": false""", T5_COMMON)
V1_1_BASE = V1_1 | TWELVE | {"d_ff": 2048}
FLAN = values('"n_positions": 512, "dense_act_fn": "gelu_new", "is_gated_act": true', V1_1)
FLAN_BASE = FLAN | TWELVE | {"d_ff": 2048}
FLAN_LARGE = values("""
    "d_ff": 2816, "d_model": 1024, "num_decoder_layers": 24, "num_heads": 16, "num_layers": 24
    """, FLAN)
ENVIT5, MADLAD = ({**base, "vocab_size": "@+0"} for base in (FLAN_BASE, FLAN_LARGE))
MADLAD |= {"d_kv": 128, "d_ff": 8192, "num_layers": 32, "num_decoder_layers": 32}
T5_GENERATION = values("""
    "_from_model_config": true, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0
    """)
BYT5 = values("""
    "d_ff": 3584, "d_model": 1472, "gradient_checkpointing": false, "num_decoder_layers": 4,
    "num_heads": 6, "num_layers": 12, "tokenizer_class": "ByT5Tokenizer", "vocab_size": "@+0"
    """, V1_1)
CODE = values("""
    "bos_token_id": 1, "eos_token_id": 2, "feed_forward_proj": "relu", "vocab_size": "@+0",
    "gradient_checkpointing": false, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}""")
CODET5, CODET5_BASE = T5_SMALL | CODE, T5_BASE | CODE
MT5 = values("""
    "architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5",
    "tokenizer_class": "T5Tokenizer", "vocab_size": "@+12" """, V1_1)
UMT5 = values("""
    "architectures": ["UMT5ForConditionalGeneration"], "classifier_dropout": 0.0,
    "dense_act_fn": "gelu_new", "is_gated_act": true, "model_type": "umt5",
    "relative_attention_max_distance": 128, "scalable_attention": true,
    "tokenizer_class": "T5Tokenizer", "torch_dtype": "float32", "vocab_size": "@+84" """, V1_1)
PILE = values("""
    "eos_token_id": 2, "tokenizer_class": "LlamaTokenizerFast", "vocab_size": "@+28"
    """, UMT5, TWELVE, {"d_ff": 2048})

WHISPER_END = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "@<|endoftext|>")
WHISPER_BEGIN = values("""
    "begin_suppress_tokens": ["@\u0120", "@<|endoftext|>"], "max_length": 448,
    "decoder_start_token_id": "@<|startoftranscript|>" """, WHISPER_END)
ENGLISH_PROMPT = {"forced_decoder_ids": [[1, "@<|notimestamps|>"]]}
PROMPT = values("""
    "forced_decoder_ids": [[1, "@<|en|>"], [2, "@<|transcribe|>"], [3, "@<|notimestamps|>"]]""")
NO_WORDS = values("""
    "suppress_tokens": [1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90,
    91, 92, 93, "@<|startoftranscript|>", "@<|translate|>", "@<|transcribe|>", "@<|startoflm|>",
    "@<|startofprev|>", "@<|nospeech|>"]""")
WHISPER = values("""
    "activation_dropout": 0.0, "activation_function": "gelu",
    "architectures": ["WhisperForConditionalGeneration"], "attention_dropout": 0.0,
    "decoder_layerdrop": 0.0, "dropout": 0.0, "encoder_layerdrop": 0.0, "init_std": 0.02,
    "is_encoder_decoder": true, "max_source_positions": 1500, "max_target_positions": 448,
    "model_type": "whisper", "num_mel_bins": 80, "scale_embedding": false,
    "torch_dtype": "float32", "transformers_version": "4.27.0.dev0", "use_cache": true,
    "vocab_size": "@+0" """, WHISPER_BEGIN)
OPENAI = WHISPER | NO_WORDS
MASKS = values("""
    "apply_spec_augment": false, "classifier_proj_size": 256, "mask_feature_length": 10,
    "mask_feature_min_masks": 0, "mask_feature_prob": 0.0, "mask_time_length": 10,
    "mask_time_min_masks": 2, "mask_time_prob": 0.05, "median_filter_width": 7,
    "torch_dtype": "float16", "use_weighted_layer_sum": false""")
LARGE_V3 = values("""
    "num_mel_bins": 128, "pad_token_id": "@-1610", "transformers_version": "4.43.2"
    """, WHISPER, MASKS)


def whisper_sizes(d_model, layers, heads, decoder_layers=None):
    whole = sizes(d_model, layers, 4 * d_model, heads, None, decoder_layers)
    return {key: value for key, value in whole.items() if key != "max_position_embeddings"}


def whisper_generation(heads, languages=()):
    """Return the generation config of a model of English, or of several languages."""
    whole = {"alignment_heads": heads, **WHISPER_BEGIN, **NO_WORDS, "return_timestamps": False}
    whole |= {"is_multilingual": bool(languages), "max_initial_timestamp_index": 50}
    whole |= {"no_timestamps_token_id": "@<|notimestamps|>"}
    whole |= {"prev_sot_token_id": "@<|startofprev|>", "transformers_version": "4.31.0.dev0"}
    if not languages:
        return whole | ENGLISH_PROMPT
    tasks = {task: f"@<|{task}|>" for task in ("transcribe", "translate")}
    whole |= {"lang_to_id": {f"<|{code}|>": f"@<|{code}|>" for code in languages}}
    return whole | {"forced_decoder_ids": [[1, None], [2, "@<|transcribe|>"]], "task_to_id": tasks}


# fmt: on
