"""Text generation against transformers' `generate` and a loop by hand, and load against the baseline."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from asking import Ask, Figures, Outcome, in_fresh_process, synchronize, wall_seconds

import redline

FIELDS = {"hidden_size": 2048, "num_hidden_layers": 16}
"""1.5 billion parameters with llama's own defaults for the rest."""
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
TUNED = {"coordinate_descent_tuning": True, "triton.enable_pdl": True}
RECIPES = ("bf16+static-cache+compile:pdl+graphs", "bf16+static-cache+decode-kernels+compile:pdl+graphs")
SEARCHED = ["bf16", "static-cache", "graphs", "decode-kernels", "compile", "compile:pdl"]
BY_HAND = ("generate of transformers", "graph by hand", "compiled graph by hand")
ROWS = dict.fromkeys((*BY_HAND, *RECIPES, "tune"))
LOADS = {
    "resnet50": ("fp16+channels-last+graphs", "500..32000"),
    "vit_b_16": ("fp16+graphs", "250..16000"),
}
AT_LEAST = 0.95


def generate(ask: Ask, row: str, _: None) -> Outcome:
    """Time per token of a llama with 1.5 billion parameters, batch 1: recipes and `tune` against the fastest loop by hand."""
    fields, prompt, new_tokens = ask.sized((FIELDS, 512, 64), (TINY, 16, 8))
    if row in BY_HAND:
        return None, in_fresh_process(by_hand, row, fields, prompt, new_tokens, ask.device)
    model = "hf:llama?" + ",".join(f"{name}={value}" for name, value in fields.items())
    settings = {"task": "generate", "prompt": prompt, "new_tokens": new_tokens, "batch": 1}
    if row == "tune":
        with ask.workspace("generate") as workspace:
            result = redline.tune(
                model, budget=ask.budget, objective="tpot", switches=ask.sized(SEARCHED, ["static-cache"]),
                device=ask.device, effort="quick", workspace=workspace, **settings,
            )  # fmt: skip
        ask.document(result, "generate_tune")
        if result.winner is None:
            return False, {"winner": None}
        row = result.winner.recipe
    found = ask.run(model, recipes=ask.sized(row, "static-cache"), **settings)
    figures: Figures = {"recipe": row, "tpot_s": found.tpot_s.p50, "ttft_s": found.ttft_s.p50}
    figures["bandwidth_share"] = found.generation.bandwidth_share
    hands = [ask.known[name]["tpot_s"] for name in BY_HAND if "tpot_s" in ask.known.get(name, {})]
    if not hands:
        return None, figures
    of_hand = min(hands) / found.tpot_s.p50
    return of_hand >= AT_LEAST, {**figures, "of_hand": of_hand}


def by_hand(way: str, fields: dict[str, int], prompt: int, new_tokens: int, device: str) -> Figures:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**fields)).eval()
        model = model if device == "cpu" else model.to(torch.bfloat16)
        tokens = torch.randint(0, model.config.vocab_size, (1, prompt))
        if way == BY_HAND[0]:
            one, whole = (generated_s(model, tokens, count) for count in (1, new_tokens))
            return {"ttft_s": one, "tpot_s": (whole - one) / (new_tokens - 1), "tokens_per_s": new_tokens / whole}
        loop = StaticLoop(model, tokens, prompt + new_tokens, TUNED if way == BY_HAND[2] else None, device)
        loop.read()
        started = time.perf_counter()
        loop.decode()
        synchronize()
        first_s, replay = time.perf_counter() - started, recorded(loop.decode, device)

        def whole_text() -> None:
            loop.read()
            for _ in range(new_tokens - 1):
                replay()

        whole, read = wall_seconds(whole_text), wall_seconds(loop.read)
        return {"ttft_s": read, "tpot_s": (whole - read) / (new_tokens - 1), "first_call_s": first_s}


def generated_s(model: Any, tokens: Any, count: int) -> float:
    settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": count, "min_new_tokens": count}
    model.generate(tokens, **settings)
    return wall_seconds(lambda: model.generate(tokens, **settings), 3)


class StaticLoop:
    """A prompt is read into a static cache, then one token after the other is written in the place of the one before."""

    def __init__(self, model: Any, prompt: Any, length: int, options: dict[str, Any] | None, device: str) -> None:
        import torch
        from transformers import StaticCache

        self.model, self.prompt, self.device = model, prompt, device
        self.token, self.place = torch.zeros((1, 1), dtype=torch.long), torch.zeros(1, dtype=torch.long)
        self.held = {"positions": self.place}
        self.takes_position = "cache_position" in inspect.signature(model.forward).parameters
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        if not self.takes_position:
            self.cache.layers = [placed_layer(self.held, length) for _ in self.cache.layers]
        self._step: Callable[[Any, Any], None] = self._next
        if options is not None:
            how = {"options": options} if device != "cpu" else {"backend": "eager"}
            self._step = torch.compile(self._next, dynamic=False, **how)

    def forward(self, tokens: Any, positions: Any) -> Any:
        self.held["positions"] = positions
        more = {"cache_position": positions} if self.takes_position else {}
        return self.model(
            input_ids=tokens, past_key_values=self.cache, position_ids=positions.unsqueeze(0), use_cache=True,
            logits_to_keep=1, **more,
        ).logits[:, -1]  # fmt: skip

    def _next(self, tokens: Any, positions: Any) -> None:
        tokens.copy_(self.forward(tokens, positions).argmax(dim=-1, keepdim=True))
        positions.add_(1)

    def read(self) -> None:
        import torch

        self.cache.reset()
        count = self.prompt.shape[1]
        logits = self.forward(self.prompt, torch.arange(count, device=self.device))
        self.token.copy_(logits.argmax(dim=-1, keepdim=True))
        self.place.fill_(count)

    def decode(self) -> None:
        self._step(self.token, self.place)


def placed_layer(held: dict[str, Any], length: int) -> Any:
    """A layer of a static cache that writes where `held["positions"]` says."""
    from transformers.cache_utils import StaticLayer

    class Placed(StaticLayer):  # type: ignore[misc]
        def update(self, keys: Any, values: Any, *args: Any, **named: Any) -> Any:
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            self.keys.index_copy_(2, held["positions"], keys)
            self.values.index_copy_(2, held["positions"], values)
            return self.keys, self.values

        def get_seq_length(self) -> Any:
            return held["positions"][0]

    return Placed(max_cache_len=length)


def recorded(decode: Callable[[], None], device: str) -> Callable[[], Any]:
    if device == "cpu":
        return decode
    import tune_workloads

    return tune_workloads.recorded(decode)


def load(ask: Ask, model: str, case: tuple[str, str]) -> Outcome:
    """The rate of requests that a fast recipe sustains within 50 ms, over that of the baseline."""
    recipe, rates = ask.sized(case, ("channels-last", "20..640"))
    with ask.workspace() as workspace:
        result = redline.load(
            ask.sized(model, "simple_cnn"), rate=rates, recipes=["baseline", recipe], max_batch=32, max_wait="2ms",
            slo_p99="50ms", seconds=0.4, effort="quick", device=ask.device, workspace=workspace,
        )  # fmt: skip
    rows = ask.document(result, f"load_{model}")["tables"]["recipes"]
    base, fast = (row["sustainable_rate"]["value"] for row in rows)
    return bool(base and fast), {
        "base_per_s": base,
        "fast_per_s": fast,
        "ratio": fast / base if base and fast else None,
    }
