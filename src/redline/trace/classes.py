"""What a kernel or operator does, told by the words in its name.

Names come from cuBLAS, cuDNN, CUTLASS, Triton, MIOpen, Tensile, Composable Kernel, NCCL/RCCL, FBGEMM and torch itself.
The first class with a word in the name counts, so their order matters: a convolution by implicit GEMM is a convolution,
not a matrix product. The function's own name decides; its template arguments only where it is a wrapper, for they
also name types: a kernel on `cutlass::bfloat16_t` need not multiply anything.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Literal, get_args

import msgspec

from redline.trace.names import LONGEST_NAME, parts_of, words_of

KernelClass = Literal[
    "convolution",
    "matmul",
    "attention",
    "norm",
    "embedding",
    "fft",
    "elementwise",
    "reduction",
    "copy",
    "communication",
    "other",
]
CLASSES: tuple[KernelClass, ...] = get_args(KernelClass)
UNCLASSIFIED: KernelClass = "other"

MEMORY_CLASSES: frozenset[KernelClass] = frozenset(("elementwise", "norm", "reduction", "copy", "embedding"))
"""Do little with each byte they touch: memory is what limits them, whatever the device."""

PRODUCT_CLASSES: frozenset[KernelClass] = frozenset(("convolution", "matmul", "attention"))
"""What the matrix units do."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RULES: tuple[tuple[KernelClass, frozenset[str]], ...] = (
    (
        "communication",
        _words(
            "nccl rccl msccl mscclpp nvshmem nvshmemi multimemall crossdevice allreduce oneshot twoshot symmmem gloo "
            "allgather reducescatter alltoall deepep"
        ),
    ),
    ("attention", _words("fmha attention attn sdpa flashfwd flashbwd flashdecode flashdecoding flashsplitkv mha mla")),
    (
        "convolution",
        _words(
            "conv convolution convolve fprop dgrad wgrad winograd implicitgemm depthwise imcol colim bwdweight bwddata "
            "scudnn hcudnn nhwckrsc nchwkcrs igemmfwd igemmbwd igemmwrw deconv flipfilter sumcomplex"
        ),
    ),
    (
        "norm",
        _words(
            "batchnorm layernorm groupnorm rmsnorm instancenorm weightnorm bnfw bnbw bnfwd bnbwd rowwisemoments "
            "gammabeta welford addrmsnorm"
        ),
    ),
    (
        "copy",
        _words(
            "copy memcpy memset clone cat catarray transpose batchedtranspose copybuffer fillbuffer converttensor "
            "addpadding transformtensor casttensor nchwto nhwcto nchwnhwc nhwcnchw kvcache andcache permute"
        ),
    ),
    ("fft", _words("fft vectorfft regularfft bluestein")),
    ("embedding", _words("embedding embeddings embs emb embeddingbag")),
    (
        "matmul",
        _words(
            "gemm sgemm hgemm dgemm cgemm zgemm igemm bgemm qgemm gemv gemvx matmul cijk nvjet cublas cublaslt cutlass "
            "xmma splitkreduce splitreduce bmm mm addmm baddbmm wgmma mfma dot linear einsum mv hipblaslt tensile epilogue"
        ),
    ),
    (
        "reduction",
        _words(
            "reduce softmax pool pooling pooled argmax argmin topk sort radix scan cumsum loss histogram bitonic "
            "multinomial meanops maxops minops mean sum amax amin std var norm normtwo prefix unique segments"
        ),
    ),
    (
        "elementwise",
        _words(
            "elementwise vectorized unrolled pointwise multitensor adam adamw adagrad sgd fill dropout distribution "
            "philox random threshold clamp relu gelu silu sigmoid tanh activation act bias index gather scatter masked "
            "where arange optensor subtensor upsample interp interpolate pad rotary rope quant quantize dequantize glu "
            "swiglu functor foreach add sub mul div neg pow sqrt rsqrt exp log abs erf hardtanh hardswish sin cos zero "
            "lerp fused flip scal tofloat hfp rowwise indices"
        ),
    ),
)
_ORDER: tuple[KernelClass, ...] = tuple(name for name, _ in _RULES)
_BY_RANK = (*_ORDER, UNCLASSIFIED)
_CLASS_OF_WORD = {word: number for number, (_, words) in reversed(list(enumerate(_RULES))) for word in words}
_CLASS_OF_WORD["cudnn"] = len(_ORDER)  # alone it tells nothing
_KNOWN_WORDS = frozenset(_CLASS_OF_WORD)
_WRAPPERS: frozenset[KernelClass] = frozenset(("elementwise", "reduction", UNCLASSIFIED))
"""Of kernels called so, what they run may stand in the template arguments."""

_TRITON: dict[str, KernelClass] = {
    "poi": "elementwise",
    "for": "elementwise",
    "red": "reduction",
    "per": "reduction",
    "tem": "matmul",
    "mm": "matmul",
    "bmm": "matmul",
}
"""What the compiler calls its kernels: pointwise, reductions, templates."""


class Described(msgspec.Struct, frozen=True, gc=False):
    """What a name tells, worked out once: a trace may hold hundreds of thousands of them."""

    kernel_class: KernelClass
    converts_layout: bool = False
    """Only turns one memory layout of images into the other."""
    is_strict_fp32: bool = False
    """A matrix product or convolution in 32-bit arithmetic, without tensor cores."""
    is_fixed_norm: bool = False
    """Batch-norm with fixed statistics."""
    is_training_norm: bool = False
    is_unfused: bool = False
    """Elementwise, one operation by itself."""
    is_softmax: bool = False
    """Not of a logarithm, which belongs to losses."""


_ANY_DIGIT = bytes.maketrans(b"123456789", b"000000000")
_NUMBERS_TELL: frozenset[KernelClass] = frozenset(("copy", "matmul", "convolution", "fft"))
"""In these, as in `tf32`, `fft2d` and `nchw2nhwc`; in the others numbers only tell one generated kernel from the next."""


@lru_cache(maxsize=1 << 18)
def describe(name: str) -> Described:
    text = name[:LONGEST_NAME]
    if text.startswith("_Z"):  # mangled: numbers are the lengths of words
        return _described(text, _class_of(text))
    told = _numbers_aside(text.encode("utf-8", "surrogatepass").translate(_ANY_DIGIT))
    return _described(text, told.kernel_class) if told.kernel_class in _NUMBERS_TELL else told


@lru_cache(maxsize=1 << 12)
def _numbers_aside(masked: bytes) -> Described:
    """Of names that differ only in numbers, what all of them tell. Bytes are masked in a tenth of the time of a text."""
    text = masked.decode("utf-8", "surrogatepass")
    kind = _class_of(text)
    return _told(kernel_class=kind) if kind in _NUMBERS_TELL else _described(text, kind)


def _described(text: str, kind: KernelClass) -> Described:
    head = text[:_LOOKED_AT]
    lower = head.lower()
    return _told(
        kernel_class=kind,
        converts_layout=kind == "copy" and _has(lower, _LAYOUTS) and bool(_LAYOUT.search(lower)),
        is_strict_fp32=kind in _PRODUCTS and _is_fp32(lower) and not _has(lower, _TENSOR_FP32),
        is_fixed_norm=kind == "norm" and _has(head, _FIXED_NORM),
        is_training_norm=_has(head, _TRAINING_NORM),
        is_unfused=kind == "elementwise" and not _has(head, _FUSED),
        is_softmax=kind == "reduction" and _is_softmax(lower),
    )


_told = cache(Described)
"""One object for all names that tell the same."""


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


def class_of(name: str) -> KernelClass:
    return describe(name).kernel_class


_VIEWS = frozenset(f"aten::{name}" for name in ("transpose", "transpose_", "permute", "swapaxes", "swapdims"))
"""Operators that move nothing, though kernels of these names do."""


def _class_of(name: str) -> KernelClass:
    if name.startswith("triton_"):
        return _of_triton(name)
    if name in _VIEWS:
        return UNCLASSIFIED
    parts = parts_of(name)
    found = _of_function(parts.function)
    arguments = parts.arguments if found in _WRAPPERS or parts.says_nothing else []
    if not arguments:
        return found
    telling = [words for words in map(_telling_words, arguments) if words]
    told = _of_words(frozenset[str]().union(*telling), name)
    return found if _RANK[found] <= _RANK[told] else told


def _of_function(function: str) -> KernelClass:
    # FBGEMM is a library of embeddings, whatever its name says.
    return _of_words(_telling_words(function.replace("fbgemm", "")), function)


def _of_triton(name: str) -> KernelClass:
    kind = _TRITON.get(name.split("_", 2)[1], UNCLASSIFIED)
    if kind != "matmul":
        return kind if kind != UNCLASSIFIED else _of_words(_telling_words(name[7:]), name)
    words = words_of(name)
    return "convolution" if "convolution" in words else "attention" if "attention" in words else "matmul"


@lru_cache(maxsize=1 << 14)
def _telling_words(identifier: str) -> frozenset[str]:
    """Those of its words that tell a class. Names differ by the hundred thousand, the identifiers in them hardly."""
    return _KNOWN_WORDS & words_of(identifier)


def _of_words(words: frozenset[str], name: str) -> KernelClass:
    if "embedding" in words and words & _ROTARY:
        return "elementwise"
    if "cudnn" in words and _NUMBERED_CUDNN.search(name) and "sdpa" not in words:
        return "convolution"
    return _BY_RANK[min((_CLASS_OF_WORD[word] for word in words), default=-1)]


_ROTARY = frozenset(("rotary", "rope"))
_NUMBERED_CUDNN = re.compile(r"\dcudnn")
"""As in `volta_fp16_s884cudnn_fp16_256x64`: a convolution of older versions."""


_RANK = {kind: number for number, kind in enumerate(_BY_RANK)}


_LOOKED_AT = 400
_LAYOUTS = ("nchw", "nhwc", "cnhw", "batched_transpose")
_LAYOUT = re.compile(
    r"nchw_?2?(?:to)?_?nhwc|nhwc_?2?(?:to)?_?nchw|[nchw]{4}2[nchw]{4}|batched_transpose_\d|nhwcaddpadding"
)
_PRODUCTS: frozenset[KernelClass] = frozenset(("matmul", "convolution", "fft"))
"""Among transforms only those by which cuDNN convolves."""
_TENSOR_FP32 = ("tf32", "s1688", "xf32")
_FP32 = ("sgemm", "scudnn", "f32f32_f32f32", "_sb_mt", "fp32_bx", "simt_s", "_ffma_", "_fp32")
_FLOAT = (
    ("gemv", ", float"), ("gemv", "<float"), ("gemm", "<float"), ("winograd", "<float"), ("conv2d", "<float"),
    ("convolve_", "<float"), ("fft2d_", "<float"), ("flip_filter", "<float"), ("sum_complex", "<float2"),
)  # fmt: skip
"""Kernels that name their type as a template argument; the last three are cuDNN's convolution by Fourier transform."""


_NARROW = ("mxfp", "nvfp4", "fp4", "fp8", "f8f", "int4", "i8")
"""Inputs in these formats go through the matrix units, whatever they are added up in."""


def _is_fp32(name: str) -> bool:
    if _has(name, _NARROW):
        return False
    if _has(name, _FP32) or (name.startswith("cijk_") and _has(name, ("_s_b_", "_sb_"))):
        return True
    return any(kernel in name and form in name for kernel, form in _FLOAT) and not _has(name, ("half", "bfloat"))


_FIXED_NORM = ("bn_fw_inf", "FwdInfer", "batch_norm_transform_input", "aten::native_batch_norm")
_TRAINING_NORM = (
    "collect_statistics", "bn_fw_tr", "bn_bw", "FwdTrain", "BnormBwd", "BatchNormBwd", "batch_norm_back", "NormBackward",
)  # fmt: skip
_FUSED = ("triton_", "multi_tensor_apply", "fused_")


def _has(name: str, parts: tuple[str, ...]) -> bool:
    # Plain, for speed: a generator would take longer than the search itself.
    for part in parts:  # noqa: SIM110
        if part in name:
            return True
    return False


def _is_softmax(name: str) -> bool:
    return "softmax" in name and "logsoftmax" not in name and "log_softmax" not in name
