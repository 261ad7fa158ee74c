"""Workloads of many kinds for the check `tune`, and plain loops over them as a careful hand writes them.

    python tools/gpu/tune_workloads.py NAME VARIANT    prints seconds per step

Nothing here uses Redline. A workload is a function of the batch that returns a module and its inputs (a tuple, or a dict of
keywords), and for training a loss of the output; `redline tune tools/gpu/tune_workloads.py:decoder` takes the same functions.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from tune_models import denoiser, digits, experts, graph, rotary, scan, sequences, upscaler, video, waves


class Block(nn.Module):
    """A pre-norm transformer block over scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Takes keywords and returns a dict, as many language models do."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 32000) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


class Encoder(nn.Module):
    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30000, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Speech(nn.Module):
    """Recurrent: three LSTM layers over frames."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(80, 512, num_layers=3, batch_first=True)
        self.head = nn.Linear(512, 40)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.lstm(frames)[0][:, -1])


class UNet(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()

        def twice(before: int, after: int) -> nn.Sequential:
            first = [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            second = [nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            return nn.Sequential(*first, *second)

        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(twice(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.join = nn.ModuleList(twice(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        kept = []
        for number, stage in enumerate(self.down):
            images = stage(images if number == 0 else F.max_pool2d(images, 2))
            kept.append(images)
        x = kept.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


class Detector(nn.Module):
    """Reads scores on the host to decide which boxes to keep, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        backbone = torchvision.models.resnet18()
        self.features = nn.Sequential(*list(backbone.children())[:-2])
        self.scores, self.boxes = nn.Conv2d(512, 3, 1), nn.Conv2d(512, 12, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images)
        scores, boxes = self.scores(features).flatten(1).float(), self.boxes(features)
        boxes = boxes.float().permute(0, 2, 3, 1).reshape(images.shape[0], -1, 4).sigmoid()
        best = []
        for score, box in zip(scores, boxes, strict=True):
            many = min(int((score > score.median()).sum().item()), 32)
            top = score.topk(max(many, 1)).indices
            corners = torch.cat([box[top, :2], box[top, :2] + box[top, 2:] + 0.01], 1)
            keep = torchvision.ops.nms(corners, score[top], 0.5)
            best.append(corners[keep].mean(0) + score[top].mean())
        return torch.stack(best)


class Recommender(nn.Module):
    """Mostly embeddings: 26 tables of 200 000 rows, and two small networks."""

    def __init__(self, tables: int = 26, rows: int = 200_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 2))
        self.register_buffer("rows", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.dense(numbers)
        looked_up = [table(categories[:, number]) for number, table in enumerate(self.tables)]
        together = torch.stack([dense, *looked_up], 1)
        products = together @ together.transpose(1, 2)
        return self.top(torch.cat([dense, products[:, self.rows[0], self.rows[1]]], 1))


class Branching(nn.Module):
    """A network whose depth depends on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))
        self.head = nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            if x.mean() > 10:
                x = x / 10
        return self.head(x)


def decoder(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    ids = torch.randint(0, 32000, (batch, 512))
    return Decoder(), {"input_ids": ids, "position_ids": torch.arange(512).expand(batch, 512).contiguous()}


def decoder_training(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]:
    model, inputs = decoder(batch)
    return model, inputs, language_loss


def language_loss(output: dict[str, Tensor]) -> Tensor:
    logits = output["logits"].float()
    targets = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[:2])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def encoder(batch: int = 16) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Encoder(), (torch.randint(0, 30000, (batch, 256)),)


def speech(batch: int = 64) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Speech(), (torch.randn(batch, 200, 80),)


def unet(batch: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return UNet(), (torch.randn(batch, 3, 256, 256),)


def detector(batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Detector(), (torch.randn(batch, 3, 320, 320),)


def recommender(batch: int = 4096) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Recommender(), (torch.randn(batch, 13), torch.randint(0, 200_000, (batch, 26, 4)))


def branching(batch: int = 64) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Branching(), (torch.randn(batch, 1024),)


def bert(batch: int = 32) -> tuple[nn.Module, dict[str, Tensor], Any]:
    """Fine-tuning as transformers does it: the labels are among the inputs, and the loss among the outputs."""
    from transformers import BertConfig, BertForSequenceClassification

    inputs = {
        "input_ids": torch.randint(0, 30522, (batch, 128)),
        "attention_mask": torch.ones(batch, 128, dtype=torch.long),
        "labels": torch.randint(0, 2, (batch,)),
    }
    return BertForSequenceClassification(BertConfig(num_labels=2)), inputs, lambda output: output["loss"]


@dataclass(frozen=True)
class Workload:
    """`model` is a name of torchvision or a function of this file."""

    model: str
    batch: int
    task: str = "infer"
    image_size: int = 224
    classes: int = 1000
    by_hand: tuple[str, ...] = ("compile",)
    """Variants of the plain loop; the fastest of them counts."""

    @property
    def is_own(self) -> bool:
        return self.model in OWN

    def settings(self, file: str) -> dict[str, Any]:
        """What `redline.tune` is asked."""
        asked: dict[str, Any] = {"batch": self.batch, "task": self.task}
        if self.is_own:
            return {"model": f"{file}:{self.model}", **asked}
        return {"model": self.model, "image_size": self.image_size, "classes": self.classes, **asked}

    def build(self) -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
        if self.is_own:
            built = OWN[self.model](self.batch)
            return built[0], built[1], built[2] if len(built) > 2 else _classes_loss
        model = torchvision.models.get_model(self.model, num_classes=self.classes)
        return model, (torch.randn(self.batch, 3, self.image_size, self.image_size),), _classes_loss


OWN: dict[str, Callable[[int], Any]] = {
    function.__name__: function
    for function in (
        decoder, decoder_training, encoder, speech, unet, detector, recommender, branching,
        rotary, denoiser, upscaler, waves, video, experts, scan, graph, sequences, digits, bert,
    )
}  # fmt: skip

WORKLOADS = {
    "resnet50": Workload("resnet50", 32),
    "convnext_tiny": Workload("convnext_tiny", 32),
    "mobilenet_v3": Workload("mobilenet_v3_large", 64),
    "vit_b_16": Workload("vit_b_16", 32, by_hand=("graph",)),
    "swin_v2_t": Workload("swin_v2_t", 32, image_size=256),
    "decoder": Workload("decoder", 8),
    "encoder": Workload("encoder", 16),
    "speech": Workload("speech", 64, by_hand=("graph",)),
    "unet": Workload("unet", 8),
    "detector": Workload("detector", 4, by_hand=("plain",)),
    "recommender": Workload("recommender", 4096, by_hand=("graph",)),
    "branching": Workload("branching", 64, by_hand=("plain",)),
    "resnet50-train": Workload("resnet50", 32, "train", by_hand=("compiled-graph",)),
    "regnet-train": Workload("regnet_y_400mf", 64, "train"),
    "cifar-train": Workload("resnet18", 256, "train", image_size=32, classes=10, by_hand=("compiled-graph",)),
    "decoder-train": Workload("decoder_training", 8, "train"),
    "recommender-train": Workload("recommender", 4096, "train", by_hand=("plain",)),
    "rotary": Workload("rotary", 4),
    "denoiser": Workload("denoiser", 8),
    "upscaler": Workload("upscaler", 4),
    "waves": Workload("waves", 8, by_hand=("compile", "plain")),
    "video": Workload("video", 4),
    "experts": Workload("experts", 2048, by_hand=("plain",)),
    "scan": Workload("scan", 32, by_hand=("compile", "graph")),
    "vit-train": Workload("vit_b_16", 32, "train"),
    "efficientnet-train": Workload("efficientnet_v2_s", 32, "train"),
    "bert-train": Workload("bert", 32, "train"),
    "efficientnet-b0-train": Workload("efficientnet_b0", 64, "train"),
    "maxvit": Workload("maxvit_t", 32),
    "graph-train": Workload("graph", 20000, "train", by_hand=("compile", "graph")),
    "sequences-train": Workload("sequences", 64, "train", by_hand=("plain", "graph")),
    "digits-train": Workload("digits", 256, "train", by_hand=("graph",)),
}


def _classes_loss(output: Tensor) -> Tensor:
    flat = output.float().flatten(2).mean(2) if output.dim() > 2 else output.float()
    return F.cross_entropy(flat, torch.arange(len(flat), device=flat.device) % flat.shape[1])


def step_by_hand(workload: Workload, variant: str) -> Callable[[], Any]:
    """`plain`: half precision and the layout. `graph`: recorded as well. `compile`: compiled with graphs of its own.

    `compiled`, `compiled-graph`: compiled, and the whole step recorded as well.
    """
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model, inputs, loss = workload.build()
    model, inputs = model.cuda(), _moved(inputs, lambda leaf: leaf.cuda())
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        model = model.to(memory_format=torch.channels_last)
        inputs = _moved(inputs, lambda leaf: leaf.to(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf)
    return _training(model, inputs, loss, variant) if workload.task == "train" else _inference(model, inputs, variant)


def _inference(model: nn.Module, inputs: Any, variant: str) -> Callable[[], Any]:
    model = model.half().eval()
    inputs = _moved(inputs, lambda leaf: leaf.half() if leaf.is_floating_point() else leaf)
    called = torch.compile(model, mode="reduce-overhead", dynamic=False) if variant == "compile" else model
    if variant.startswith("compiled"):
        called = torch.compile(model, dynamic=False)

    def step() -> Any:
        with torch.inference_mode():
            return called(**inputs) if isinstance(inputs, dict) else called(*inputs)

    return recorded(step) if "graph" in variant else step


def _training(model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor], variant: str) -> Callable[[], Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01, momentum=0.9, fused=True)
    called: Any = model
    if variant == "compile":
        called = torch.compile(model, mode="reduce-overhead", dynamic=False)
    elif variant.startswith("compiled"):
        called = torch.compile(model, dynamic=False)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            value = loss(called(**inputs) if isinstance(inputs, dict) else called(*inputs))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return recorded(step) if "graph" in variant else step


def _moved(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(inputs, dict):
        return {name: change(leaf) for name, leaf in inputs.items()}
    return tuple(change(leaf) for leaf in inputs)


def recorded(step: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    # The step stays with it: the graph reads model and inputs, and does not hold them.
    def replay(_reads: Callable[[], Any] = step) -> None:
        graph.replay()

    return replay


def _timed(step: Callable[[], Any], steps: int = 200) -> float:
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for event in events[:-1]:
        event.record()
        step()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3


def main() -> None:
    """Print the seconds of a step. With --wait: say when it is compiled, and time it after the next line of input."""
    name, variant, *options = sys.argv[1:]
    step = step_by_hand(WORKLOADS[name], variant)
    if "--wait" in options:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        print("ready", flush=True)
        sys.stdin.readline()
    print(_timed(step), flush=True)


if __name__ == "__main__":
    main()
