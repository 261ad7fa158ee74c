"""What a kernel does, told by its name; and a name short enough for a table.

Names come from cuBLAS, cuDNN, CUTLASS, Triton, MIOpen, Tensile, Composable Kernel, NCCL/RCCL and torch itself. The first
rule that fits counts, so their order matters: a convolution by implicit GEMM is a convolution, not a matrix product.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, get_args

KernelClass = Literal[
    "convolution", "matmul", "attention", "norm", "elementwise", "reduction", "copy", "communication", "other"
]
CLASSES: tuple[KernelClass, ...] = get_args(KernelClass)
UNCLASSIFIED: KernelClass = "other"

MEMORY_CLASSES: frozenset[KernelClass] = frozenset(("elementwise", "norm", "reduction", "copy"))
"""Do little with each byte they touch: memory is what limits them, whatever the device."""

SHORT_NAME_LENGTH = 56
LONGEST_NAME = 4000
"""Names are looked at so far: no library writes longer ones, but anyone may write a trace."""

_RULES: tuple[tuple[KernelClass, str], ...] = (
    # hipblaslt_gemm is no collective, and neither is anything else whose name begins with hip.
    (
        "communication",
        r"^(?!hip)(void )?(nccl|rccl|msccl|nvshmem)|ncclDevKernel|ncclKernel|\bncclFunction|multimem_all_|"
        r"cross_device_reduce|(one|two)_shot_all_reduce|symm_mem|^c10d::|^gloo:",
    ),
    ("convolution", r"^triton_\w*convolution"),
    ("matmul", r"^triton_(tem|mm|bmm)"),
    ("reduction", r"^triton_(red|per)"),
    ("elementwise", r"^triton_(poi|for)"),
    (
        "attention",
        r"flash_?(fwd|bwd|attn|attention|decod)|fmha|\battention|attention_(kernel|fwd|bwd|forward|backward)|"
        r"_attention\b|_attention_|attn_(fwd|bwd)|paged_attention|scaled_dot_product|flashinfer|_sdpa",
    ),
    (
        "convolution",
        r"(?<!un)conv(?!ert)|fprop|dgrad|wgrad|winograd|igemm_(fwd|bwd|wrw)|implicit_?gemm|miopensp3|depthwise|"
        r"im2col|col2im|bwd_weight|bwd_data|scudnn|\d+cudnn|nhwckrsc|xdlops_conv",
    ),
    (
        "norm",
        r"(batch|layer|group|rms|instance|weight)_?norm|\bbn_(fw|bw)|bnfwd|bnbwd|batchnorm|RowwiseMoments|GammaBeta",
    ),
    ("copy", r"splitk?_?copy|^memcpy|^memset|copy_kernel|copy_device|CatArrayBatchedCopy|copyBuffer|fillBuffer"),
    ("copy", r"nchw_?2?(to)?_?nhwc|nhwc_?2?(to)?_?nchw|[nchw]{4}2[nchw]{4}|batched_transpose|\btranspose_|_transpose_"),
    (
        "copy",
        r"SubTensorOpWithCastTensor|convertTensor|nhwcAddPadding|TransformTensor|^aten::(copy_|_to_copy|clone|cat)",
    ),
    (
        "matmul",
        r"gemm|gemv|matmul|cijk_|nvjet|cublas|cutlass|xmma|splitk.{0,3}reduce|\bbmm|\baddmm|\bbaddbmm|\bmm\b|_mm_|"
        r"wgmma|mfma|dot_kernel|^aten::(linear|mv|einsum|matmul)|^mkldnn::_linear",
    ),
    (
        "reduction",
        r"reduce|softmax|pool|argm(ax|in)|topk|sort|scan|cumsum|loss|histogram|bitonic|radix|multinomial|"
        r"MeanOps|NormTwoOps|^aten::(mean|sum|max|min|std|var|norm|linalg_vector_norm)\b",
    ),
    (
        "elementwise",
        r"elementwise|vectorized|unrolled|pointwise|multi_tensor_apply|adam|sgd|fill|dropout|distribution|philox|random|"
        r"threshold|clamp|relu|gelu|silu|sigmoid|tanh|activation|bias|index|gather|scatter|embedding|masked|where|arange|"
        r"SubTensorOp|op_?tensor|upsample|interp|\bpad|rotary|rope|quantize|\bglu|swiglu|functor|"
        r"^aten::_?(foreach_)?(add|sub|mul|div|neg|pow|sqrt|rsqrt|exp|log|abs|erf|hardtanh|hardswish|sin|cos|zero|lerp|"
        r"fused_)\w*",
    ),
)
_COMPILED = tuple((name, re.compile(rule, re.IGNORECASE)) for name, rule in _RULES)

_LAYOUT = re.compile(
    r"nchw_?2?(to)?_?nhwc|nhwc_?2?(to)?_?nchw|[nchw]{4}2[nchw]{4}|batched_transpose_\d|nhwcAddPadding", re.IGNORECASE
)
_TENSOR_CORE_FP32 = re.compile(r"tf32|s1688|xf32", re.IGNORECASE)
_FP32 = re.compile(
    r"sgemm|scudnn|_f32f32_f32f32_|f32f32_f32f32|Cijk_\w*?_S_?B|_SB_MT|fp32_bx|gemv\w*<\w*,? ?float|winograd\w*<float|"
    r"simt_s|_ffma_|gemm\w*<float|convolve_sgemm|conv2d\w*<float|_fp32\b|Sp3AsmConv\w*_fp32",
    re.IGNORECASE,
)
_WORD = re.compile(r"([A-Za-z_]\w*)(\(?)")
_TELLING = ("Op", "Ops", "_kernel_cuda", "_kernel_impl", "_cuda_kernel", "Epilogue", "KernelImpl")
_WRAPPERS = frozenset(("gpu_kernel_impl", "ReduceOp", "BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor"))
"""Functors that only carry another one."""


KernelLibrary = Literal["cuDNN", "cuBLAS", "Triton", "MIOpen", "rocBLAS", "NCCL", "oneDNN", "copy", "native"]
"""Whose code a kernel is; `native` is torch's own, and what no other name tells."""

_LIBRARIES: tuple[tuple[KernelLibrary, str], ...] = (
    ("NCCL", r"nccl|rccl"),
    ("copy", r"^memcpy|^memset|^copyBuffer|^fillBuffer"),
    ("Triton", r"^triton_|^_?triton"),
    # Convolutions by implicit GEMM come from cuDNN, whoever wrote the kernel.
    ("cuDNN", r"cudnn|_fprop|_dgrad|_wgrad|fprop_|dgrad_|wgrad_|nhwcAddPadding|implicit_gemm|\bbn_(fw|bw)_"),
    ("MIOpen", r"miopen|igemm_(fwd|bwd|wrw)|Sp3Asm|naive_conv|SubTensorOpWith"),
    ("rocBLAS", r"^Cijk_|rocblas|hipblas|tensile"),
    ("cuBLAS", r"cublas|nvjet|xmma_gemm|gemv|splitK|cutlass.{0,80}gemm|\wgemm_"),
    ("oneDNN", r"mkldnn|onednn|dnnl"),
)
_COMPILED_LIBRARIES = tuple((name, re.compile(rule, re.IGNORECASE)) for name, rule in _LIBRARIES)


@lru_cache(maxsize=100_000)
def library_of(name: str) -> KernelLibrary:
    """By the name of the kernel, or of the operator on a CPU."""
    name = name[:LONGEST_NAME]
    return next((library for library, rule in _COMPILED_LIBRARIES if rule.search(name)), "native")


@lru_cache(maxsize=100_000)
def class_of(name: str) -> KernelClass:
    name = name[:LONGEST_NAME]
    for kind, rule in _COMPILED:
        if rule.search(name):
            return kind
    return UNCLASSIFIED


def converts_layout(name: str) -> bool:
    """A kernel that only turns one memory layout of images into the other."""
    return bool(_LAYOUT.search(name[:LONGEST_NAME]))


def is_strict_fp32(name: str) -> bool:
    """A matrix product or convolution in 32-bit arithmetic, without tensor cores. Told by the name alone."""
    name = name[:LONGEST_NAME]
    is_product = class_of(name) in ("matmul", "convolution")
    return is_product and bool(_FP32.search(name)) and not _TENSOR_CORE_FP32.search(name)


@lru_cache(maxsize=100_000)
def short_name(name: str) -> str:
    """The function without namespaces, types and parameters, with the functor that tells what it computes."""
    plain = printable(name[:LONGEST_NAME]).removeprefix("void ").replace("(anonymous namespace)::", "")
    if plain.startswith("_Z"):
        base, functor = _unmangled(plain), ""
    else:
        head = _outside_brackets(plain)
        base = head.rpartition("::")[2].strip() or plain
        template = plain[len(head) :] if "<" in plain else ""
        functor = next((f"<{word}>" for word in _telling_words(template) if word not in base), "")
    short = base + functor
    return short if len(short) <= SHORT_NAME_LENGTH else short[: SHORT_NAME_LENGTH - 1] + "…"


def printable(text: str) -> str:
    """Nothing in it that a terminal would obey."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "\ufffd" for one in text)


def _telling_words(template: str) -> Iterator[str]:
    """The names among a kernel's template arguments that say what it computes."""
    for word, called in _WORD.findall(template):
        tells = "Functor" in word or word.endswith(_TELLING) or (called and word.endswith("_kernel"))
        if tells and word not in _WRAPPERS:
            yield word


def _outside_brackets(text: str) -> str:
    """Up to the first template argument or parameter, which is where a demangled function's own name ends."""
    for position, character in enumerate(text):
        if character == "<" or (character == "(" and position):
            return text[:position]
    return text


def _unmangled(name: str) -> str:
    """The innermost name of a mangled one: `_ZN2ck6device6kernelI…` is `kernel`."""
    position, found = 3 if name.startswith("_ZN") else 2, name
    while match := re.compile(r"(\d+)").match(name, position):
        length = int(match.group(1)[:4])
        found = name[match.end() : match.end() + length]
        position = match.end() + length
    return found or name
