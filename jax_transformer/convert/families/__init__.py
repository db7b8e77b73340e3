"""Model families of Hugging Face transformers, one file each."""
