"""Small models that take and return unlike things, each as a factory. What is right for each stands in test_contracts.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

WIDTH = 6


class Layer(nn.Module):
    """Holds one linear layer, with as many outputs as a subclass says."""

    out: int

    def __init_subclass__(cls, out: int) -> None:
        cls.out = out

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, self.out)


# Inputs that are no single batch of images; the factory is told the batch


class Detector(nn.Module):
    """As torchvision's: a list of images of unlike sizes in, a list of dicts out, or losses while training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.boxes = nn.Linear(WIDTH, 4)
        self.scores = nn.Linear(WIDTH, 2)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        features = [self.norm(self.body(image[None])).relu().mean((0, 2, 3)) for image in images]
        if not self.training:
            return [{"boxes": self.boxes(each), "scores": self.scores(each)} for each in features]
        if targets is None:
            raise ValueError("targets should not be none when in training mode")
        for target in targets:
            if bool((target["boxes"][:, 2:] <= target["boxes"][:, :2]).any()):
                raise ValueError("All bounding boxes should have positive height and width")
        regression = sum(
            F.smooth_l1_loss(self.boxes(each), target["boxes"].mean(0))
            for each, target in zip(features, targets, strict=True)
        )
        labels = torch.stack([target["labels"][0] for target in targets])
        return {"regression": regression, "classes": F.cross_entropy(self.scores(torch.stack(features)), labels)}


def _images(count: int) -> list[Tensor]:
    return [torch.rand(3, 10 + 2 * (place % 2), 12) for place in range(count)]


def detector(batch: int) -> Any:
    return Detector(), (_images(batch),)


def detector_training(batch: int) -> Any:
    corner = torch.rand(batch, 2, 2)
    boxes = torch.cat([corner, corner + 1 + torch.rand(batch, 2, 2)], dim=-1)
    targets = [{"boxes": each, "labels": torch.randint(0, 2, (2,))} for each in boxes]
    return Detector(), (_images(batch), targets)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def time_first(batch: int) -> Any:
    return TimeFirst(), torch.randn(20, batch, WIDTH)


class Tempered(Layer, out=5):
    """A scalar setting comes first."""

    def forward(self, temperature: Tensor, x: Tensor) -> Tensor:
        return self.layer(x) / temperature


def scalar_first(batch: int) -> Any:
    return Tempered(), (torch.tensor(0.7), torch.randn(batch, WIDTH))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.head(self.gru(packed)[1][-1])


def _lengths(batch: int) -> list[int]:
    return [9 - place % 5 for place in range(batch)]


def packed(batch: int) -> Any:
    sequences = [torch.randn(length, WIDTH) for length in sorted(_lengths(batch), reverse=True)]
    return Packed(), (pack_sequence(sequences),)


def packed_tokens(batch: int) -> Any:
    """The same, counted in tokens."""
    model, inputs = packed(batch)
    return {"model": model, "inputs": inputs, "items": sum(_lengths(batch)), "item": "token"}


class Bags(nn.Module):
    """All tokens of all items in one row, and where each item begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(40, WIDTH, mode="mean")
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(tokens, offsets))


def bags(batch: int) -> Any:
    lengths = torch.tensor(_lengths(batch))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    return Bags(), (torch.randint(0, 40, (int(lengths.sum()),)), offsets)


class Graphs(nn.Module):
    """Messages along edges, then the mean of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
        source, target = edge_index
        gathered = torch.zeros_like(x).index_add(0, target, self.message(x)[source])
        count = int(graph.max()) + 1
        summed = x.new_zeros(count, WIDTH).index_add(0, graph, (x + gathered).relu())
        return self.head(summed / graph.bincount(minlength=count)[:, None])


def _graphs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    ring = torch.stack([torch.arange(5), (torch.arange(5) + 1) % 5])
    edges = torch.cat([ring + 5 * place for place in range(count)], dim=1)
    return torch.randn(5 * count, WIDTH), edges, torch.arange(count).repeat_interleave(5)


def graphs(batch: int) -> Any:
    return Graphs(), _graphs(batch)


class Nested(Layer, out=3):
    """A ragged tensor: rows of unlike length."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.sum(0) for row in self.layer(x).unbind()])


def nested(batch: int) -> Any:
    rows = [torch.randn(length, WIDTH) for length in _lengths(batch)]
    return Nested(), torch.nested.nested_tensor(rows, layout=torch.jagged)


class Undifferentiated(nn.Linear):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def undifferentiated(batch: int) -> Any:
    return Undifferentiated(WIDTH, 3), torch.randn(batch, WIDTH)


class OneMode(nn.Linear):
    """As the modules of torch.export."""

    def train(self, mode: bool = True) -> Any:
        raise NotImplementedError("Calling train() is not supported yet.")


def one_mode(batch: int) -> Any:
    return OneMode(WIDTH, 3), torch.randn(batch, WIDTH)


def ragged_out(batch: int) -> Any:
    rows = [torch.randn(length, WIDTH) for length in _lengths(batch)]
    return nn.Linear(WIDTH, 3), torch.nested.nested_tensor(rows, layout=torch.jagged)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, WIDTH)
        self.head = nn.Linear(WIDTH, 30)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.tokens(input_ids) * attention_mask[..., None]
        return {"logits": self.head(hidden.cumsum(1)), "pooled": hidden.sum(1)}


def keywords(batch: int) -> Any:
    mask = torch.arange(7)[None] < torch.tensor([7 - place % 3 for place in range(batch)])[:, None]
    return Keywords(), {"input_ids": torch.randint(0, 30, (batch, 7)), "attention_mask": mask}


@dataclass
class Scene:
    image: Tensor
    depth: Tensor
    name: str = "scene"


class OfScenes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(4, 5, 3)

    def forward(self, scene: Scene) -> Scene:
        return Scene(self.body(torch.cat([scene.image, scene.depth], 1)).mean((2, 3)), scene.depth.mean((1, 2, 3)))


def dataclasses(batch: int) -> Any:
    return OfScenes(), (Scene(torch.rand(batch, 3, 8, 8), torch.rand(batch, 1, 8, 8)),)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(WIDTH, 4, 3)

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.layer(*pair), pair.right.sum(1))


def named_tuples(batch: int) -> Any:
    return OfPairs(), Pair(torch.randn(batch, WIDTH), torch.randn(batch, 4))


class Greedy(nn.Module):
    """Answers with tokens, not with scores."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        for _ in range(3):
            following = self.head(self.tokens(tokens).mean(1)).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens


def integers_out(batch: int) -> Any:
    return Greedy(), torch.randint(0, 30, (batch, 5))


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, signal: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(signal) * self.filter)


def complex_numbers(batch: int) -> Any:
    return Spectrum(), torch.randn(batch, 8, dtype=torch.complex64)


class Towers(nn.Module):
    """Two towers and the similarity of every pair: the batch is along both axes of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, WIDTH), nn.EmbeddingBag(30, WIDTH)

    def forward(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        return F.normalize(self.image(pixels), dim=-1) @ F.normalize(self.text(tokens), dim=-1).T


def two_towers(batch: int) -> Any:
    return Towers(), {"pixels": torch.randn(batch, 12), "tokens": torch.randint(0, 30, (batch, 5))}


class Stateful(nn.Module):
    """Keeps its hidden state between calls, as a streaming model does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state).detach()
        return self.cell(x, self.state)


def stateful(batch: int) -> Any:
    return Stateful(), torch.randn(batch, WIDTH)


class Adjacency(Layer, out=3):
    """A sparse matrix first: its size is of nodes, not of items."""

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        return torch.stack([torch.sparse.mm(adjacency, self.layer(each)) for each in x])


def sparse_first(batch: int) -> Any:
    return Adjacency(), (torch.eye(7).to_sparse(), torch.randn(batch, 7, WIDTH))


class Captions(Layer, out=3):
    """Takes text beside tensors."""

    def forward(self, x: Tensor, captions: list[str]) -> Tensor:
        return self.layer(x) + torch.tensor([[float(len(caption))] for caption in captions])


def with_text(batch: int) -> Any:
    return Captions(), (torch.randn(batch, WIDTH), [f"picture {place}" for place in range(batch)])


@dataclass
class Answer:
    loss: Tensor
    logits: Tensor


class OwnLoss(Layer, out=4):
    """Computes its own loss from labels, as transformers' models do."""

    def forward(self, x: Tensor, labels: Tensor) -> Answer:
        logits = self.layer(x)
        return Answer(F.cross_entropy(logits, labels), logits)


def own_loss(batch: int) -> Any:
    return OwnLoss(), {"x": torch.randn(batch, WIDTH), "labels": torch.randint(0, 4, (batch,))}


class Energy(Layer, out=1):
    """One number for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def scalar_out(batch: int) -> Any:
    return Energy(), torch.randn(batch, WIDTH)


class Counting(nn.Module):
    """Writes into a buffer and into its own input."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x.clamp_(-2, 2)
        return self.layer(x) + 0.1 * self.calls.clamp(max=5)


def in_place(batch: int) -> Any:
    return Counting(), torch.randn(batch, WIDTH)


class Overwriting(Layer, out=3):
    """Scales its input in place: the same tensor would grow with every step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(1.5).add_(1))


def overwriting(batch: int) -> Any:
    return Overwriting(), torch.randn(batch, WIDTH)


class Sampled(nn.Module):
    """Draws random numbers in its forward pass, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, dim=-1)
        return self.decode(mean + 3 * torch.randn_like(mean) * spread.exp())


def sampled(batch: int) -> Any:
    return Sampled(), torch.randn(batch, WIDTH)


def in_half(batch: int) -> Any:
    layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 3))
    return layers.bfloat16(), torch.randn(batch, WIDTH, dtype=torch.bfloat16)


class Popping(Layer, out=3):
    """Takes entries out of the dict it is given, and puts others in."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["logits"] = self.layer(batch.pop("x"))
        return batch


def popping(batch: int) -> Any:
    return Popping(), ({"x": torch.randn(batch, WIDTH)},)


class Forces(nn.Module):
    """Differentiates in its forward pass, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, positions: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.energy(positions).sum((1, 2))
            (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return {"energy": energy, "forces": -slope}


def forces(batch: int) -> Any:
    return Forces(), torch.randn(batch, 5, 3)


class ForcesOfTheCaller(Forces):
    """Expects that the caller has left gradients on."""

    def forward(self, positions: Tensor) -> dict[str, Tensor]:
        positions.requires_grad_()
        energy = self.energy(positions).sum((1, 2))
        return {"energy": energy, "forces": -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]}


def forces_of_the_caller(batch: int) -> Any:
    return ForcesOfTheCaller(), torch.randn(batch, 5, 3)


class Sample:
    """No container that torch or Redline knows."""

    def __init__(self, features: Tensor) -> None:
        self.features, self.name = features, "sample"


class OfSamples(Layer, out=3):
    def forward(self, sample: Sample) -> Sample:
        return Sample(self.layer(sample.features))


def own_objects(batch: int) -> Any:
    return OfSamples(), (Sample(torch.randn(batch, WIDTH)),)


class Policy(Layer, out=2):
    def forward(self, state: Tensor) -> torch.distributions.Normal:
        mean, spread = self.layer(state).chunk(2, dim=-1)
        return torch.distributions.Normal(mean, F.softplus(spread))


def distribution_out(batch: int) -> Any:
    return Policy(), torch.randn(batch, WIDTH)


class Lazily(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        yield super().forward(x)


def lazily(batch: int) -> Any:
    return Lazily(WIDTH, 3), torch.randn(batch, WIDTH)


class Silent(nn.Linear):
    def forward(self, x: Tensor) -> None:  # type: ignore[override]
        super().forward(x)


def silent(batch: int) -> Any:
    return Silent(WIDTH, 3), torch.randn(batch, WIDTH)


def two_targets(batch: int) -> Any:
    """A loss of two parts, with targets of its own for each."""
    model = Keywords()
    inputs = {"input_ids": torch.randint(0, 30, (batch, 7)), "attention_mask": torch.ones(batch, 7, dtype=torch.bool)}
    targets = {"token": torch.randint(0, 30, (batch, 7)), "pooled": torch.randn(batch, WIDTH)}

    def loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
        tokens = F.cross_entropy(output["logits"].flatten(0, 1), target["token"].flatten())
        return tokens + F.mse_loss(output["pooled"], target["pooled"])

    return model, inputs, loss, targets


class Cached(nn.Module):
    """Writes into the cache it is given, as a decoder does; in a training the cache then has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor], position: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query, key, value = self.layer(x).chunk(3, dim=-1)
        cache[0][:, position], cache[1][:, position] = key[:, 0], value[:, 0]
        return (query @ cache[0].transpose(1, 2)).softmax(-1) @ cache[1], cache


def cached(batch: int) -> Any:
    return Cached(), (torch.randn(batch, 1, WIDTH), (torch.randn(batch, 7, WIDTH), torch.randn(batch, 7, WIDTH)), 4)


# Factories that are not told the batch: it is found, declared, or unknown


def fixed_own_loss() -> Any:
    """The mean loss changes with the items; their logits do not."""
    return OwnLoss(), {"x": torch.randn(5, WIDTH), "labels": torch.randint(0, 4, (5,))}


def fixed_energy() -> Any:
    """One number, which is the mean over the items."""
    return Energy(), torch.randn(5, WIDTH)


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, WIDTH)

    def forward(self, texts: list[str]) -> Tensor:
        return torch.stack([self.letters(torch.tensor(list(text.encode()))).mean(0) for text in texts])


def fixed_texts() -> Any:
    return Texts(), (["one", "two", "three", "four", "five"],)


def ignoring(batch: int) -> Any:
    """Is told a batch and makes eight items, whatever it is."""
    return nn.Conv2d(3, 4, 3), torch.rand(8, 3, 6, 6)


def fixed_time_first() -> Any:
    return TimeFirst(), torch.randn(20, 8, WIDTH)


def fixed_encoder() -> Any:
    """Without positions its tokens could be put in any order, but not left out."""
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0), torch.randn(10, 4, WIDTH)


def fixed_list() -> Any:
    return Detector(), (_images(3),)


def fixed_towers() -> Any:
    return Towers(), {"pixels": torch.randn(6, 12), "tokens": torch.randint(0, 30, (6, 5))}


def fixed_graph() -> Any:
    x, edges, graph = _graphs(3)
    return Graphs(), (x, edges, graph)


def fixed_packed() -> Any:
    return packed(4)


def declared_axis() -> Any:
    return {"model": nn.Linear(WIDTH, 3), "inputs": torch.randn(20, 4, WIDTH), "batch_axis": 1}


def declared_items() -> Any:
    x, edges, graph = _graphs(3)
    return {"model": Graphs(), "inputs": (x, edges, graph), "items": 15, "item": "node"}
