"""Kernel names as libraries write them, and the class each belongs to."""

from __future__ import annotations

import pytest
from kineto import ADAM, ADD, CONV, GEMM, NORM, REDUCE

from redline.trace.names import class_of, describe, short_name

NAMES = {
    "communication": [
        REDUCE,
        "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)",
        "rcclGenericKernel",
        "multimem_all_reduce_kernel<c10::BFloat16>",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
        "nvshmemi_transfer_rma",
    ],
    "convolution": [
        CONV,
        "void cudnn::ops::scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int)",
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32",
        "miopenSp3AsmConv_v30_3_1_gfx94x_fp16_dot2_edc_stride1",
        "sm80_xmma_wgrad_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>(float const*)",
        "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47Gridwise",
        "triton_tem_fused_convolution_3",
        "void pointwise_mult_and_sum_complex<float2, 8, 4>(float2*, float2*, float2*, int, int, int, int, int, float2)",
    ],
    "matmul": [
        GEMM,
        "ampere_sgemm_128x64_tn",
        "nvjet_tst_192x192_64x3_2x1_v_bz_coopA_NNT",
        "Cijk_Ailk_Bljk_BBS_BH_MT64x64x64_MI16x16x16x1",
        "hipblaslt_gemm_bf16",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)",
        "void gemv2T_kernel_val<int, int, float>(float)",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)",
        "triton_tem_fused_mm_4",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, false>(cublasGemvParams<float>)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int> > >(Params)",
        "_ZN2ck27kernel_gemm_xdl_cshuffle_v3INS_28GridwiseGemm_xdl_cshuffle_v3E",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4> >(Flash_fwd_params)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "void aiter::fmha_fwd_d128_bf16",
        "_attn_fwd",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7",
    ],
    "norm": [
        NORM,
        "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(float)",
        "void at::native::batch_norm_collect_statistics_kernel<at::native::Var, float>(int)",
        "MIOpenBatchNormFwdInferSpatialEst",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>(long)",
        "void at::native::unrolled_elementwise_kernel_for_multi_outputs<3, at::native::batch_norm_update_stats>(int)",
    ],
    "elementwise": [
        ADD,
        ADAM,
        "triton_poi_fused_add_relu_3",
        "SubTensorOpWithScalar1d",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)",
        # A type of CUTLASS among the template arguments multiplies nothing, nor does a namespace of FBGEMM.
        "void my::activation_kernel<cutlass::bfloat16_t, 4>(cutlass::bfloat16_t*)",
        "void fbgemm_gpu::_compute_FP8_quantize_cuda_kernel<float>(float const*)",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float> > >(int)",
        "triton_per_fused_native_layer_norm_2",
        "triton_red_fused_mean_1",
        "void at::native::(anonymous namespace)::max_pool_forward_nchw<float>(int)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>(float*)",
    ],
    "copy": [
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<unsigned int, 4, 64, 64>(int)",
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(int)",
        "batched_transpose_16x32_half",
        "transpose_CNHW2NCHW_V2_2D_WG_off64",
        "__amd_rocclr_copyBuffer.kd",
    ],
    "embedding": [
        "void split_embedding_codegen_forward_unweighted_kernel<c10::Half, c10::Half, float, false, long, 2ul, 32ul>(int)",
        "split_embedding_backward_codegen_rowwise_adagrad_unweighted_find_long_segments(at::GenericPackedTensorAccessor<int>)",
        "void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<float, long>(long const*)",
    ],
    "fft": [
        "void fft2d_r2c_32x32<float, false, 1u, false>(float2*, float const*, int, cudnn::reduced_divisor)",
        "void vector_fft<128u, EPT<8u>, 8u, 32u, (padding_t)0, (twiddle_t)0, (loadstore_modifier_t)2>(kernel_arguments_t)",
    ],
    "other": ["my_secret_kernel", "_Z3foov", ""],
}


@pytest.mark.parametrize(("expected", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_class(expected: str, name: str) -> None:
    assert class_of(name) == expected


def test_only_layout_changes_are_layout_changes() -> None:
    found = {name for names in NAMES.values() for name in names if describe(name).converts_layout}
    assert {short_name(name) for name in found} == {
        "nchwToNhwcKernel",
        "batched_transpose_16x32_half",
        "transpose_CNHW2NCHW_V2_2D_WG_off64",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ampere_sgemm_128x64_tn", True),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)", True),
        ("void implicit_convolve_sgemm<float, float, 1024>(int)", True),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nchw_tilesize128x128x8", True),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw", False),
        ("cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4", False),
        (GEMM, False),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize32x32x8_g1_ffma_aligna4", True),
        ("void gemmSN_TN_kernel<float, 128, 16, 2, 4>(int)", True),
        ("nvjet_sss_128x64_64x6_2x1_v_bz_TNN", False),  # nvjet runs on tensor cores only
        ("Cijk_Ailk_Bljk_SB_MT64x64x16", True),
        ("Cijk_Ailk_Bljk_HB_MT64x64x16", False),
        ("Cijk_MXFP4_gemm_Fp32_f32f32_f32f32", False),  # narrow formats that are summed up in fp32
        ("gemm_fp8_fp8_f32f32_f32f32", False),
        (ADD, False),
        # Convolution by Fourier transform, in four kinds of kernels.
        ("void fft2d_r2c_32x32<float, false, 1u, false>(float2*, float const*, int, cudnn::reduced_divisor)", True),
        ("void fft2d_c2r_16x16<float, false, false, 0u, false, false>(float*, float2 const*)", True),
        ("void flip_filter<float, float>(float*, float const*, int)", True),
        ("void pointwise_mult_and_sum_complex<float2, 8, 4>(float2*, float2*, float2*, int)", True),
        ("void convolve_common_engine_float_NHWC<float, float, 1024, 5, 5, 3, 3, 3, true>(int)", True),
        ("void convolve_common_engine_float_NHWC<__half, __half, 1024, 5, 5, 3, 3, 3, true>(int)", False),
        ("void vector_fft<128u, EPT<8u>, 8u, 32u, (padding_t)0, (twiddle_t)0>(kernel_arguments_t)", False),
        ("void conv_depthwise2d_forward_kernel<3, float, int>(float const*)", False),  # tensor cores do not help it
    ],
)
def test_strict_fp32_by_name(name: str, expected: bool) -> None:
    assert describe(name).is_strict_fp32 is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (ADD, "vectorized_elementwise_kernel<CUDAFunctor_add>"),
        (ADAM, "multi_tensor_apply_kernel<FusedAdamMathFunctor>"),
        (REDUCE, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
        (
            "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_",
            "kernel_batched_gemm_xdlops_bwd_weight",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float> > >(int)",
            "reduce_kernel<MeanOps>",
        ),
        ("x" * 200, "x" * 55 + "…"),
        # Names that say nothing give way to what they run.
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x64_32x4_tn_align8>(Params)",
            "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x64_32…",
        ),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>(cublasGemvParams<float>)",
            "gemvx::kernel",
        ),
        ("_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassE", "Rmsnorm2dFwd"),
        ("void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::Pipeline> >(int)", "FmhaFwdKernel"),
        ("", ""),
        ("_Z", "_Z"),
        ("(odd)", "(odd)"),
    ],
)
def test_short_name(name: str, expected: str) -> None:
    assert short_name(name) == expected


@pytest.mark.parametrize("name", ["aten::transpose", "aten::permute", "aten::t", "aten::view"])
def test_operators_that_only_view_are_no_copies(name: str) -> None:
    assert class_of(name) == "other"
    assert class_of("aten::copy_") == "copy"
