"""A model exported to ONNX and run by ONNX Runtime, with torch's tensors going in and coming out."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from redline.bench.recipe.plain.models import CallForm


class OnnxModel:
    """Called like the model it was made from, with inputs of the same shapes. Inputs and outputs are not copied."""

    ELEMENT_TYPES = {
        torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7,
        torch.bool: 9, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16,
    }  # fmt: skip

    def __init__(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        with torch.no_grad():
            # The leaves say what to make room for at each call; those that are no tensors stay as they are.
            self.leaves, self.structure = tree_flatten(model(*args, **kwargs))
        self.form = CallForm(args, kwargs)
        given = self.form.tensors(args, kwargs)
        self.device = given[0].device
        self.stream: Any = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with torch.no_grad():
            program: Any = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, verbose=False)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.onnx")
            program.save(path, external_data=True)  # within one file a model may have 2 GB
            self.session = self.open_session(path)
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]
        shapes = [list(tensor.shape) for tensor in given]
        if [value.shape for value in self.session.get_inputs()] != shapes:
            raise RuntimeError(f"the exported model takes {self.inputs} of other shapes than the {shapes} it was given")
        if len(self.outputs) != sum(isinstance(leaf, torch.Tensor) for leaf in self.leaves):
            raise RuntimeError(f"the exported model returns {len(self.outputs)} tensors, and the model does not")

    def open_session(self, path: str) -> Any:
        import onnxruntime

        options, self.run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        if self.device.type != "cuda":
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        # On a stream of ours, and without waiting at the end: the host runs ahead, as it does with torch.
        self.run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        settings = {
            "device_id": str(self.device.index or 0),
            "user_compute_stream": str(self.stream.cuda_stream),
            "use_tf32": str(int(torch.backends.cuda.matmul.allow_tf32)),
        }
        session = onnxruntime.InferenceSession(path, options, providers=[("CUDAExecutionProvider", settings)])
        if "CUDAExecutionProvider" not in session.get_providers():
            raise RuntimeError("ONNX Runtime could not start its CUDA provider and would have computed on the CPU")
        return session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [tensor.contiguous() for tensor in self.form.tensors(args, kwargs)]
        leaves = [self.room_for(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        binding = self.session.io_binding()
        for name, tensor in zip(self.inputs, given, strict=True):
            binding.bind_input(name, *self.place_of(tensor))
        for name, tensor in zip(self.outputs, made, strict=True):
            binding.bind_output(name, *self.place_of(tensor))
        if self.stream is None:
            self.session.run_with_iobinding(binding, self.run_options)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            self.session.run_with_iobinding(binding, self.run_options)
            torch.cuda.current_stream().wait_stream(self.stream)
        return tree_unflatten(leaves, self.structure)

    def room_for(self, example: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(example, memory_format=torch.contiguous_format)

    def place_of(self, tensor: torch.Tensor) -> tuple:
        kind = self.ELEMENT_TYPES[tensor.dtype]
        return self.device.type, self.device.index or 0, kind, tuple(tensor.shape), tensor.data_ptr()
