"""Generation on the CPU: the same text whatever the cache and the compiler, and one clear line where it cannot be had."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from redline.analyze.measurement import measurements
from redline.bench.device import open_device
from redline.bench.measure.generation import generation_info
from redline.bench.recipe.compose import apply_recipe
from redline.bench.recipe.numerics import GreedyReference
from redline.bench.recipe.snippet import snippet_of
from redline.bench.session import BenchSession
from redline.bench.workload.build import build_workload, check_model
from redline.bench.workload.decoder import HfDecoder, asks_the_host, own_decoder
from redline.bench.workload.generation import GenerateStep
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError, SpecError
from redline.model.protocol import BlockReply, Close, FailureReply, Measure, Prepare, PreparedReply, Reply
from redline.model.record import Numerics, RunRecord
from redline.model.spec import MeasureSpec, Recipe, RunSpec, WorkloadSpec

pytest.importorskip("transformers")

SMALL = "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,vocab_size=97"
LLAMA = f"hf:llama?{SMALL},num_key_value_heads=2"
GPT2 = "hf:gpt2?n_embd=32,n_layer=2,n_head=4,vocab_size=97,n_positions=64"
MISTRAL = f"hf:mistral?{SMALL},num_key_value_heads=2,sliding_window=5"
MAMBA = "hf:mamba?hidden_size=64,num_hidden_layers=2,vocab_size=97,state_size=8"
OPT = "hf:opt?hidden_size=32,ffn_dim=64,num_hidden_layers=2,num_attention_heads=4,vocab_size=97,word_embed_proj_dim=32"
WRITERS = Path(__file__).parents[1] / "models" / "writers.py"


def workload_spec(model: str, **more: int) -> WorkloadSpec:
    return WorkloadSpec(model=model, task="generate", **{"batch": 2, "prompt": 9, "new_tokens": 8, **more})


def setup_of(model: str, recipe: str = "baseline", **more: int) -> Setup:
    return apply_recipe(Recipe.parse(recipe), build_workload(workload_spec(model, **more), 0), open_device("cpu"))


def refusal_of(model: str, recipe: str = "baseline") -> str:
    """The one line with which a session refuses to prepare this."""
    prepared, _, _ = measured(model, recipe)
    assert isinstance(prepared, FailureReply)
    assert "\n" not in prepared.failure.message
    return prepared.failure.message


def text_of(model: str, recipe: str = "baseline") -> torch.Tensor:
    step = GenerateStep(setup_of(model, recipe))
    with step.context():
        step()
        return step()


@pytest.mark.parametrize("model", [LLAMA, GPT2, OPT, f"{WRITERS}:placed"])
@pytest.mark.parametrize("recipe", ["static-cache", "static-cache:length=40", "static-cache+compile:backend=eager"])
def test_greedy_tokens_are_the_same_whatever_the_cache(model: str, recipe: str) -> None:
    plain = text_of(model)
    assert plain.shape == (2, 8)
    assert torch.equal(text_of(model, recipe), plain)


@pytest.mark.parametrize("model", [LLAMA, OPT])
def test_no_static_step_asks_the_host(model: str) -> None:
    """OPT counts filled positions to make a mask: a GPU could not record that."""
    step = GenerateStep(setup_of(model, "static-cache"))
    with step.context():
        step()
        assert not asks_the_host(step.prefill)
        assert not asks_the_host(step.decode)


def test_a_window_that_slides_is_kept_whole_and_masked() -> None:
    """Layers of transformers that slide count on the host: every token would be compiled anew, and no graph would slide."""
    plain = text_of(MISTRAL)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(text_of(MISTRAL, "static-cache+compile:backend=eager"), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_it_writes_what_transformers_writes() -> None:
    workload = build_workload(workload_spec(LLAMA), 0)
    own = text_of(LLAMA)
    decoder = workload.model
    made = decoder.model.generate(decoder.prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(made[:, 9:], own)


def judged(recipe: str, *, spoil: bool = False) -> Numerics:
    workload, device = build_workload(workload_spec(LLAMA), 0), open_device("cpu")
    reference = GreedyReference.of(workload, device, "bf16" if "bf16" in recipe else "fp32")
    setup = apply_recipe(Recipe.parse(recipe), workload, device)
    if spoil:
        with torch.no_grad():
            next(workload.model.model.model.layers.parameters()).mul_(1.5)
    return reference.judge(GenerateStep(setup), setup)


def test_a_recipe_is_judged_by_logits_on_given_tokens_and_by_its_own() -> None:
    exact = judged("static-cache")
    assert exact.passed, exact.reason
    assert exact.method == "tokens"
    assert (exact.greedy_tokens, exact.greedy_agreed) == (8, 8)
    rounded = judged("bf16+static-cache")
    assert rounded.passed, rounded.reason
    for recipe in ("bf16+sdpa:math", "amp-bf16+static-cache+sdpa:math"):  # whose check reads a token by itself
        assert judged(recipe).passed
    assert rounded.rel_l2 is not None
    assert 1e-4 < rounded.rel_l2 < 0.1
    assert not judged("static-cache", spoil=True).passed


def measured(model: str, recipe: str = "baseline", **more: int) -> tuple[Reply, Reply | None, RunSpec]:
    spec = RunSpec(
        workload=workload_spec(model, **more),
        recipe=Recipe.parse(recipe),
        measure=MeasureSpec.for_effort("quick"),
        device="cpu",
    )
    session = BenchSession(on_progress=lambda progress: None)
    prepared = session.handle(Prepare(spec=spec))
    block = session.handle(Measure(kind="throughput", seconds=0.1)) if isinstance(prepared, PreparedReply) else None
    session.handle(Close())
    return prepared, block, spec


@pytest.mark.parametrize("model", [LLAMA, f"{WRITERS}:summing"])
def test_a_row_tells_first_token_further_tokens_and_what_they_read(model: str) -> None:
    prepared, reply, spec = measured(model)
    assert isinstance(prepared, PreparedReply), prepared
    assert isinstance(reply, BlockReply), reply
    info, block = prepared.prepared.generation, reply.block
    assert info is not None
    assert len(block.token_s) == 7 * len(block.samples)
    record = RunRecord(id="1", spec=spec, prepared=prepared.prepared, blocks=(block,), stopped="target")
    (row,) = measurements([record])
    assert (row.item, row.items_per_step) == ("tok", 16)
    found = msgspec.to_builtins(row.generation)
    assert 0 < found["ttft_s"] < min(block.samples) + max(block.samples)
    assert set(found["tpot_s"]) == {"p50", "p95", "p99", "n"}
    assert found["prefill_tokens_per_s"] == pytest.approx(18 / found["ttft_s"])
    assert found["decode_tokens_per_s"] == pytest.approx(2 / found["tpot_s"]["p50"])
    assert (found["bandwidth_share"] > 0) == (info.read_bytes > 0)
    if model == LLAMA:
        assert prepared.prepared.workload.class_name == "LlamaForCausalLM"
        parameters = prepared.prepared.workload.parameters
        assert found["weight_bytes"] == 4 * parameters
        assert info.read_bytes == 4 * (parameters - 97 * 64)  # without the table, of which a row is taken
        assert (
            found["cache_bytes"] == 4 * 2 * 2 * (2 * 2 * 16) * 16
        )  # layers, keys and values, batch, heads, width, length


@pytest.mark.parametrize(
    ("model", "more", "told"),
    [
        (GPT2, {"prompt": 80}, "need 87 positions; .* has 64"),
        ("hf:llama?hiden_size=32", {}, "did you mean hidden_size"),
        ("hf:llama?hidden_size", {}, "write config fields as"),
        ("hf:llama?hidden_size=abc", {}, "'hidden_size': .*int"),
        ("hf:vit", {}, "writes no text"),
        ("hf:t5", {}, "hf:t5 has an encoder: --task generate measures causal models"),
        ("resnet18", {}, "resnet18 writes no text: --task generate takes hf:NAME"),
    ],
)
def test_what_cannot_be_written_is_one_line(model: str, more: dict[str, int], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        check_model(workload_spec(model, **more))


def test_a_model_without_a_cache_is_one_line() -> None:
    with pytest.raises(SpecError, match=r"cannot be built from its config: .*negative dimension"):
        build_workload(workload_spec("hf:gpt2?n_embd=32,n_head=4,n_layer=1,vocab_size=-3"), 0)
    with pytest.raises(SpecError, match="has no cache: give it forward"):
        build_workload(workload_spec(f"{WRITERS}:cacheless"), 0)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        (LLAMA, "bf16+static-cache+compile:backend=eager"),
        (GPT2, "static-cache"),
        (f"{WRITERS}:placed", "static-cache"),
    ],
)
def test_the_snippet_writes_what_was_measured(model: str, recipe: str) -> None:
    spec = RunSpec(workload=workload_spec(model), recipe=Recipe.parse(recipe), device="cpu")
    namespace: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(snippet_of(spec), "snippet", "exec", dont_inherit=True), namespace)
    decoder = build_workload(spec.workload, 0).model
    generate = namespace["optimise"](decoder.model, decoder.prompt, decoder.new_tokens)
    generate(decoder.prompt)
    assert torch.equal(generate(decoder.prompt), text_of(model, recipe))


def test_a_snippet_by_name_makes_its_model_itself() -> None:
    code = snippet_of(RunSpec(workload=workload_spec(LLAMA), device="cpu"))
    assert 'AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", hidden_size=64,' in code
    assert "torch.randint(0, 97, (2, 9))" in code


@pytest.mark.parametrize(
    ("model", "recipe", "told"),
    [
        (LLAMA, "static-cache+compile:freeze", "the tensors of a static cache"),
        (LLAMA, "compile", "static-cache|graphs"),
        (LLAMA, "graphs", "static-cache|graphs"),
        (LLAMA, "static-cache:length=15", "15 positions are too few for a prompt of 9 and 8 new tokens; 16 are needed"),
    ],
)
def test_switches_that_do_not_apply_are_one_line(model: str, recipe: str, told: str) -> None:
    with pytest.raises(BenchError, match=told):
        setup_of(model, recipe)


@pytest.mark.parametrize(
    ("model", "recipe", "told"),
    [
        ("summing", "static-cache", "make_cache"),
        ("short", "baseline", r"^IndexError: index out of range in self \(prompt of 9 tokens, 8 new ones\)$"),
        ("small", "static-cache", r"\(prompt of 9 tokens, 8 new ones\)"),
    ],
)
def test_what_a_model_of_ones_own_cannot_do_is_one_line(model: str, recipe: str, told: str) -> None:
    assert re.search(told, refusal_of(f"{WRITERS}:{model}", recipe))


def test_logits_of_another_shape_are_one_line() -> None:
    workload = build_workload(workload_spec(f"{WRITERS}:summing"), 0)
    workload.model.model.head.register_forward_hook(lambda layer, inputs, logits: logits.mean(dim=-1))
    with pytest.raises(BenchError, match=r"must be batch × tokens × vocabulary.*got 2×1 of torch.float32"):
        GreedyReference.of(workload, open_device("cpu"), "fp32")


@pytest.mark.parametrize("recipe", ["baseline", "static-cache:length=64"])
def test_what_a_token_reads_of_the_cache_does_not_depend_on_its_size(recipe: str) -> None:
    step = GenerateStep(setup_of(LLAMA, recipe))
    with step.context():
        step()
    position = 2 * 2 * (2 * 2 * 16)  # layers, keys and values, batch × heads × width
    reads = list(step.decoder.cache_reads())
    assert sum(tensor.numel() for tensor, _ in reads) == position * (16 if recipe == "baseline" else 64)
    # Of 10 to 16 positions, on average.
    assert sum(share * tensor.numel() for tensor, share in reads) == pytest.approx(position * 13)


MIXTRAL = f"hf:mixtral?{SMALL},num_key_value_heads=2,num_local_experts=4,num_experts_per_tok=2"
EXPERTS = 2 * 4 * 3 * 64 * 128  # layers, experts, matrices
ATTENTION = 2 * (2 * 64 * 64 + 2 * 64 * 32)


@pytest.mark.parametrize(
    ("model", "weights", "read", "cache"),
    [
        # One table for tokens and for logits; that of positions gives a row.
        (GPT2, 30624, 30624 - 64 * 32, 2 * 2 * 32 * 16),
        # Of four experts, the two that a token is sent to; with the router, five norms and the layer of logits.
        (
            MIXTRAL,
            EXPERTS + ATTENTION + 2 * 4 * 64 + 5 * 64 + 2 * 97 * 64,
            EXPERTS // 2 + ATTENTION + 2 * 4 * 64 + 5 * 64 + 97 * 64,
            2 * 2 * 32 * 16,
        ),
        # Layers without attention keep a state of one size: of the convolution, and of the recurrence.
        (MAMBA, 65536, 65536, 2 * 128 * (4 + 8)),
    ],
)
def test_what_a_model_holds_and_what_a_token_reads_of_it(model: str, weights: int, read: int, cache: int) -> None:
    step, device = GenerateStep(setup_of(model, batch=1)), open_device("cpu")
    with step.context():
        step()
    info = generation_info(step, device)
    assert (info.weight_bytes, info.read_bytes, info.cache_bytes) == (4 * weights, 4 * read, 4 * cache)
    assert generation_info(step, device, watch=False).read_bytes == 4 * (
        weights - 97 * 64 if model == MIXTRAL else read
    )


def test_a_model_that_decodes_without_its_text_is_refused() -> None:
    with pytest.raises(SpecError, match="takes no cache of transformers"):
        build_workload(workload_spec("hf:rwkv?hidden_size=32,num_hidden_layers=1,vocab_size=97"), 0)
    bert = "hf:bert?hidden_size=32,num_hidden_layers=1,num_attention_heads=4,vocab_size=97"
    with pytest.raises(BenchError, match="tokens see later ones"):
        GreedyReference.of(build_workload(workload_spec(bert), 0), open_device("cpu"), "fp32")
    GreedyReference.of(build_workload(workload_spec(f"{bert},is_decoder=true"), 0), open_device("cpu"), "fp32")
    workload = build_workload(workload_spec(LLAMA), 0)
    workload.model._cache_argument = "another"  # which it takes and never looks at
    with pytest.raises(BenchError, match=r"after the prompt and 2 tokens its logits are .* off"):
        GreedyReference.of(workload, open_device("cpu"), "fp32")


def test_a_live_model_of_transformers_has_a_cache() -> None:
    model = build_workload(workload_spec(GPT2), 0).model.model
    decoder = own_decoder(model, workload_spec("live"), 2, 0, "a live model")
    assert isinstance(decoder, HfDecoder)
    assert int(decoder.prompt.max()) < 97
