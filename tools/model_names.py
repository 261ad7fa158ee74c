"""Does one quick measurement of models by name work, source by source and family by family?

Each name is measured for a moment on the CPU with one item and a small input, or must be refused with a reason. Of
`hf:` names the config is made small first (few layers, narrow, a short vocabulary): the architecture is what is tried.

    python tools/model_names.py                # all of them, a few minutes on two cores
    python tools/model_names.py hf timm        # some sources
    python tools/model_names.py --only detr    # names that contain this
    python tools/model_names.py --every-hf     # every hf: name that `redline models` lists
    python tools/model_names.py --write        # also write the table into docs/models.md
    python tools/model_names.py --unfed        # write the list of hf: names that refuse what Redline can make up

Exits with 1 where something broke without being refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import redline
from redline.model.errors import RedlineError

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- table begins: tools/model_names.py -->", "<!-- table ends -->"

QUICK = {
    "block_seconds": 0.05,
    "min_rounds": 1,
    "min_samples": 1,
    "max_seconds": 0.5,
    "warmup_max_seconds": 0.2,
    "warmup_window": 1,
}

TORCHVISION = (
    # classification
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnext50_32x4d",
    "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vit_b_32", "wide_resnet50_2",
    # segmentation
    "deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large",
    # detection
    "fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_resnet50_fpn", "fcos_resnet50_fpn", "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large",
    # video
    "mc3_18", "mvit_v1_b", "r2plus1d_18", "r3d_18", "s3d", "swin3d_t",
    # optical flow
    "raft_small", "raft_large",
    # quantized
    "quantized_googlenet", "quantized_inception_v3", "quantized_mobilenet_v2", "quantized_mobilenet_v3_large",
    "quantized_resnet18", "quantized_resnext101_32x8d", "quantized_shufflenet_v2_x0_5",
)  # fmt: skip
TRAINED = (
    "resnet18", "lraspp_mobilenet_v3_large", "r3d_18", "raft_small",
)  # fmt: skip
TIMM = (
    "cait_xxs24_224", "coat_tiny", "convnext_atto", "crossvit_tiny_240", "deit_tiny_patch16_224", "dla34",
    "edgenext_xx_small", "efficientformer_l1", "efficientnet_lite0", "ghostnet_050", "hrnet_w18_small", "levit_128s",
    "mixer_s32_224", "mobilenetv3_small_050", "mobilevit_xxs", "nfnet_l0", "poolformer_s12", "regnetx_002", "resnet18",
    "rexnet_100", "swin_tiny_patch4_window7_224", "tf_efficientnetv2_b0", "vit_tiny_patch16_224", "xcit_nano_12_p16_224",
)  # fmt: skip
HF = (
    # text in
    "bert", "roberta", "deberta-v2", "distilbert", "electra", "canine", "gpt2", "llama", "mistral", "qwen2", "mixtral",
    "mamba", "falcon", "gpt_neox", "t5", "bart", "marian",
    # images in
    "vit", "swin", "convnext", "resnet", "beit", "segformer", "detr", "yolos", "dpt", "sam",
    # sound in
    "wav2vec2", "hubert", "whisper", "speecht5", "audio-spectrogram-transformer", "encodec",
    # several
    "clip", "siglip", "blip", "llava", "vilt",
    # video and series
    "videomae", "timesformer", "vivit", "patchtst", "time_series_transformer",
)  # fmt: skip
SIZES = {
    "inception_v3": 96, "quantized_inception_v3": 96, "maxvit_t": 224, "ssd300_vgg16": None, "s3d": 224,
    "ssdlite320_mobilenet_v3_large": None, "raft_small": 128, "raft_large": 128, "mvit_v1_b": None,
}  # fmt: skip
"""Pixels per side, where not the usual few; None: the model has a size of its own."""


@dataclass
class Outcome:
    name: str
    task: str
    kind: str
    said: str
    """What was measured, or why it was refused."""
    state: str
    """measured, refused or broken"""
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", choices=["torchvision", "timm", "hf", []], help="default: all")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--every-hf", action="store_true", help="every hf: name that is listed")
    parser.add_argument("--write", action="store_true", help="write the table into docs/models.md")
    parser.add_argument(
        "--unfed", action="store_true", help="only ask every hf: name, without memory, and keep which refuse"
    )
    asked = parser.parse_args()
    if asked.unfed:
        return _write_unfed()
    sources = asked.sources or ["torchvision", "timm", "hf"]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, redline.Workspace(keep=False) as workspace:
        listed = {row["name"]: row["kind"] for row in redline.models(workspace=workspace).rows}
        for name, task in _wanted(sources, listed, every_hf=asked.every_hf):
            if asked.only not in name:
                continue
            one = _tried(name, task, listed.get(name, "not listed"), Path(folder), workspace)
            outcomes.append(one)
            print(f"{one.state:9} {one.seconds:5.1f} s  {name} {task}: {one.said}", flush=True)
    counts = {state: sum(one.state == state for one in outcomes) for state in ("measured", "refused", "broken")}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    if asked.write:
        _write(outcomes)
    return 1 if counts["broken"] else 0


def _write_unfed() -> int:
    """Ask every architecture of transformers, on the meta device, whether it takes what Redline can make up."""
    from redline.bench.workload.sources import hf

    hf.UNFED.write_text("")  # all names are then listed
    refused = {}
    for model in hf.HfSource().models():
        if (why := _refusal(model.name)) is not None:
            refused[model.name.removeprefix("hf:")] = why
            print(f"{model.name}: {why}", flush=True)
    hf.UNFED.write_text("".join(f"{name}\n" for name in sorted(refused)))
    print(f"{len(refused)} are not listed")
    return 0


def _refusal(name: str) -> str | None:
    """Returns why the architecture cannot compute; None if it can, or if only real numbers would tell."""
    import torch

    from redline.bench.device.failure import one_line
    from redline.bench.workload.sources import hf
    from redline.model.spec import WorkloadSpec

    spec = WorkloadSpec(model=name)
    try:
        config = hf.read_config(name.removeprefix("hf:"))
        with torch.device("meta"):
            _, names, model = hf.choose(config, spec)
            inputs, _ = hf.make_inputs(config, names, spec, 1)
        with torch.no_grad():
            model(**{key: tensor.to("meta") for key, tensor in inputs.items()})
    except NotImplementedError:
        return None  # an operator that has no meta kernel: with real numbers it may well run
    except Exception as error:
        # A branch on values, and a tensor that the model makes itself in memory, tell nothing here.
        told = one_line(error)
        of_two_devices = "device" in str(error) and ("meta" in str(error) or "same device" in str(error))
        return None if of_two_devices or "meta tensors" in told else told
    return None


def _wanted(sources: list[str], listed: dict[str, str], *, every_hf: bool) -> Iterator[tuple[str, str]]:
    if "torchvision" in sources:
        yield from ((name, "infer") for name in TORCHVISION)
        yield from ((name, "train") for name in TRAINED)
    if "timm" in sources:
        yield from ((f"timm:{name}", "infer") for name in TIMM)
    if "hf" in sources:
        names = [name for name in listed if name.startswith("hf:")] if every_hf else [f"hf:{name}" for name in HF]
        yield from ((name, "infer") for name in names)


def _tried(name: str, task: str, kind: str, folder: Path, workspace: redline.Workspace) -> Outcome:
    started = time.perf_counter()
    source, _, bare = name.rpartition(":")
    settings: dict[str, Any] = {"task": task, "device": "cpu", "batch": 2 if task == "train" else 1, "effort": "quick"}
    try:
        model = f"hf:{_small_config(bare, folder)}" if source == "hf" else name
        if source != "hf" and (size := SIZES.get(bare, 64 if source == "" else None)) is not None:
            settings["image_size"] = size
        row = redline.run(model, **settings, measure=QUICK, workspace=workspace)
        record = row.records[0]
        failure = record.failure
        if failure is not None:
            state, said = ("broken", f"{failure.stage}: {failure.told}")
            if failure.stage == "build" and failure.kind == "user":
                state, said = "refused", failure.message
        else:
            state, said = "measured", _described(record)
    except RedlineError as error:
        state, said = "refused", str(error)
    said = " ".join(said.replace(str(folder), "…").split())
    return Outcome(name, task, kind, said, state, time.perf_counter() - started)


def _described(record: Any) -> str:
    workload = record.prepared.workload
    part = next((str(each) for each in workload.notes if each.code == "model"), "")
    shapes = ", ".join(workload.input_shapes)
    return f"{workload.class_name}: {shapes}" + (f" ({part})" if part else "")


def _small_config(name: str, folder: Path) -> Path:
    """A folder with the architecture's own config, made small."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name).to_dict()
    _shrink(config)
    config["model_type"] = name
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config, default=str))
    return place


LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth")
LAYERS += ("num_encoder_layers", "num_decoder_layers", "num_blocks")


def _shrink(config: dict[str, Any]) -> None:
    """Fewer layers, experts and words, as far as that leaves the rest consistent; in towers too."""
    for name in LAYERS:
        if isinstance(config.get(name), int) and config[name] > 2:
            config[name] = 2
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(name), list):
            config[name] = config[name][:2]
    for name in ("out_features", "out_indices", "stage_names"):  # they name layers that are gone
        config.pop(name, None)
    words = [part["vocab_size"] for part in (config, config.get("text_config") or {}) if part.get("vocab_size")]
    if isinstance(config.get("vocab_size"), int) and config["vocab_size"] > 1000:
        config["vocab_size"] = 1000
    if any(isinstance(size, int) and size > 1000 for size in words):
        for name, value in config.items():
            if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= 1000:
                config[name] = 900 + sum(map(ord, name)) % 90
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if isinstance(config.get(name), int):
            config[name] = min(config[name], 4)
    _narrow(config)
    for name, below in config.items():
        if isinstance(below, dict) and (name.endswith("_config") or name in ("encoder", "decoder")):
            _shrink(below)


def _narrow(config: dict[str, Any]) -> None:
    """Models of billions of parameters, by their width."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(width, int) or not isinstance(heads, int) or width <= 1024:
        return
    config["hidden_size"], config["num_attention_heads"] = 256, 4
    groups = config.get("num_key_value_heads")
    if isinstance(groups, int):
        config["num_key_value_heads"] = 4 if groups == heads else 2
    for name in ("intermediate_size", "ffn_hidden_size"):
        if isinstance(config.get(name), int):
            config[name] = 512
    if isinstance(config.get("head_dim"), int):
        config["head_dim"] = 64


def _write(outcomes: list[Outcome]) -> None:
    """The table of docs/models.md."""
    packages = ("torch", "torchvision", "timm", "transformers")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    lines = [
        f"Made by `tools/model_names.py` with {versions}.",
        "",
        "| name | task | kind | what was measured, or why not |",
    ]
    lines.append("|---|---|---|---|")
    for one in outcomes:
        said = one.said.replace("|", "\\|")
        lines.append(
            f"| `{one.name}` | {one.task} | {one.kind} | {said if one.state == 'measured' else f'{one.state}: {said}'} |"
        )
    text = DOCS.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    DOCS.write_text("\n".join([f"{head}{BEGIN}", "", *lines, "", f"{END}{tail}"]))


if __name__ == "__main__":
    sys.exit(main())
