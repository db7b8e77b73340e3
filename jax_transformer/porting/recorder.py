import json
import os
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):  # keeps each operation, and the numbers of its values
    def __init__(self, model):
        super().__init__()
        self.calls, self.parts, self.leaves, self.constants = [], [], {}, {}
        self.keys, self.alive, self.aliases, self.names, self.path = {}, [], {}, {}, [""]
        for name, tensor in model.state_dict(keep_vars=True).items():
            self.names.setdefault(self.place(tensor), []).append(name)

    def place(self, tensor):  # two names of one place are one weight
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()

    def key(self, tensor, new=False):
        if new or id(tensor) not in self.keys:
            names = None if new else self.names.get(self.place(tensor))
            known = self.leaves.get(names[0]) if names else None
            key = self.keys[id(tensor)] = len(self.alive) if known is None else known["key"]
            self.alive.append(tensor)  # no other tensor may get its id
            self.aliases.setdefault(self.place(tensor)[0], {})[id(tensor)] = tensor
            if names and known is None:
                self.leaves[names[0]] = {"key": key, "names": names, "shape": list(tensor.shape)}
            elif not new and not names:
                self.constants[key] = tensor.detach().cpu().contiguous().clone()
        return self.keys[id(tensor)]

    def text(self, value):  # an argument as JSON, without devices and layouts
        if isinstance(value, torch.Tensor):
            return {"value": self.key(value)}
        if isinstance(value, list | tuple):
            return [self.text(item) for item in value]
        if isinstance(value, float | torch.dtype):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        return value if isinstance(value, bool | int | str) else None

    def line(self):  # the innermost one outside of torch and of this class
        frame, inside = sys._getframe(2), os.path.dirname(torch.__file__)
        while frame.f_back and (
            frame.f_code.co_filename.startswith(inside)
            or frame.f_code.co_name == "__torch_dispatch__"
        ):
            frame = frame.f_back
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

    def add(self, name, arguments, outputs):
        shapes = [list(x.shape) if torch.is_tensor(x) else None for x in outputs]
        keys = [self.key(x, new=True) if torch.is_tensor(x) else None for x in outputs]
        self.calls.append([name, *arguments, keys, shapes, self.path[-1], self.line()])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, composite = kwargs or {}, "CompositeImplicitAutograd"
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite):
            with self:  # inference_mode hands whole functions over
                return func.decompose(*args, **kwargs)
        arguments = self.text(args), {name: self.text(value) for name, value in kwargs.items()}
        infos = [argument.alias_info for argument in func._schema.arguments]
        written = [x for x, info in zip(args, infos, strict=False) if info and info.is_write]
        others = [
            (x, y, self.text(y))
            for x in written
            for y in [*self.aliases[self.place(x)[0]].values()]
            if y is not x
        ]
        output = func(*args, **kwargs)
        self.add(str(func), arguments, tree_leaves(output))
        for x, y, before in others:  # what shares its storage has another value, too
            geometry = [[z.storage_offset(), list(z.shape), list(z.stride())] for z in (y, x)]
            self.add("overwrite", ([before, self.text(x), *geometry], {}), [y])
        return output

    def observe(self, name, module):
        def enter(module, args):
            self.path.append(name)

        def leave(module, args, kwargs, output):
            self.path.pop()
            both = [
                [self.key(x) for x in tree_leaves(y) if torch.is_tensor(x)]
                for y in (output, [args, kwargs])
            ]
            self.parts.append([name, type(module).__name__, *both])

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave, with_kwargs=True)


def record(model, call, src, tgt):  # one run as named tensors, without the weights
    recorder = Recorder(model)
    hooks = [hook for name, part in model.named_modules() for hook in recorder.observe(name, part)]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        ids = {"source": recorder.key(src), "target": recorder.key(tgt)}
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), recorder:
            outputs = tree_leaves(call(model, src, tgt))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for hook in hooks:
            hook.remove()
    logits = next(
        x for x in outputs if torch.is_tensor(x) and x.is_floating_point() and x.dim() > 1
    )
    text = ids | {"output": recorder.key(logits), "calls": recorder.calls, "parts": recorder.parts}
    text["leaves"] = [*recorder.leaves.values()]
    tensors = {str(key): tensor for key, tensor in recorder.constants.items()}
    packed = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
    return tensors | {"program": packed, "logits": logits.detach().cpu().contiguous().clone()}
