"""The charts in docs/charts, one for each topic, from the reports in benchmarks/results.

A row of a chart is one case, or a group of cases with the geometric mean of their speed-ups, as the subtitle says. A
chart shows all cases of its reports, but for the GRU in float32 without TF32, and causal cases without the peer that
pads first; the subtitle counts these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import bar_chart, report, wording
from benchmarks.bar_chart import Bar, Chart, Panel
from benchmarks.contender_names import OURS, TORCH_COMPILED, TORCH_GRU_GRAPH
from benchmarks.families import family
from benchmarks.report import Report, Row

_Speedup = Callable[[Row], float | None]


@dataclasses.dataclass(frozen=True)
class Topic:
    """A chart.

    Attributes:
      name: of the file, without its suffix.
      title: what the chart shows; the hardware follows it.
      reports: the reports that it joins.
      row: the name of the chart's row that a row of a report belongs to.
      about: lines of the subtitle.
      panels: the titles of the panels, each with the speed-up that it shows.
    """

    name: str
    title: str
    reports: Sequence[str]
    row: Callable[[Row], str]  # empty: not in the chart
    about: Sequence[str] = ()
    panels: Mapping[str, _Speedup] = dataclasses.field(default_factory=lambda: _OVER_BOTH)


def _over(library: str) -> _Speedup:
    def speedup(row: Row) -> float | None:
        return None if library == "JAX" and report.lacks_padded_peer(row) else report.speedup(row, library)

    return speedup


_OVER_BOTH = {f"over {library}": _over(library) for library in report.PEERS}


def _scaling(row: Row) -> float:
    return row["throughput_over_one_device"][OURS]


_NETWORKS = {
    "unet3d": "3D U-Net",
    "unet": "U-Net",
    "ddpm-unet": "DDPM U-Net",
    "ddpm-unet-small": "DDPM U-Net, small",
    "wavenet": "WaveNet",
    "wavenet-causal": "WaveNet, causal",
    "resnext-blocks": "ResNeXt blocks",
    "convnext-blocks96": "ConvNeXt blocks, 96",
    "convnext-blocks384": "ConvNeXt blocks, 384",
    "resnet-blocks": "ResNet blocks",
    "resnet50": "ResNet-50",
    "resnext50": "ResNeXt-50",
    "convnext-t": "ConvNeXt-T",
    "resnext": "ResNeXt, small",
    "mobilenet": "MobileNetV2, small",
    "mobilenet-v2": "MobileNetV2",
    "efficientnet-b0": "EfficientNet-B0",
    "vit-stem": "ViT-B/16 stem",
    "conformer": "Conformer blocks",
    "resnet18-cifar": "ResNet-18, 64x64",
    "resnet18": "ResNet-18, 224x224",
}
_DTYPES = {"float32": "f32", "bfloat16": "bf16"}


def _network(row: Row) -> str:
    settings = row["settings"]
    return f"{_NETWORKS[settings['network']]}, {_DTYPES[row['dtype']]}"


def _conv_family(row: Row) -> str:
    return f"{family(row['settings'])}: {wording.pass_name(row['measure'])}"


def _normalized(row: Row) -> str:
    """By the norm, the size of the array in memory, and its dtype."""
    kind = row["settings"].get("kind", "batch-norm").replace("-", " ")
    megabytes = row["array_bytes"]["x"] / 1e6
    size = "over 20 MB" if megabytes > 20 else "1 to 20 MB" if megabytes > 1 else "under 1 MB"
    return f"{kind}, {size}, {_DTYPES[row['dtype']]}: {wording.pass_name(row['measure'])}"


def _gru(row: Row) -> str:
    s = row["settings"]
    if s.get("highest"):
        return ""
    names = {"bidirectional": "2 directions", "resets": "resets", "lengths": "lengths"}
    kind = "".join(f", {word}" for name, word in names.items() if s.get(name))
    return f"{s['T']}, {s['B']}, {s['I']}, {s['H']}, {_DTYPES[row['dtype']]}{kind}: {wording.pass_name(row['measure'])}"


def _per_example(row: Row) -> str:
    s = row["settings"]
    where = "GPU" if row["platform"] == "gpu" else "CPU"
    return f"{where}: {s['batch']} images of {s['size']}x{s['size']}, {s['features']} features"


_STEP = ("One step: loss, all gradients and SGD with momentum.",)
_MEANS = "Bars and numbers: geometric means over the number of cases in brackets. Thin lines: slowest to fastest case."
_GRU = (
    "Rows: T, B, I, H (steps, batch, inputs, hidden units).",
    "Over JAX: geometric means of linear_before_reset=0 and 1, thin lines between both. PyTorch computes 1 only.",
)
_GRU_ON_GPU = (
    *_GRU,
    "PyTorch: the faster of eager calls and a CUDA graph. cuDNN: its fastest algorithm, called directly.",
)

TOPICS = (
    Topic("steps-h200", "training steps", ["steps-h200"], _network, _STEP),
    Topic("steps-cpu", "training steps", ["steps-cpu"], _network, _STEP),
    Topic(
        "scaling-h200",
        "data-parallel training steps",
        ["scaling-h200"],
        _network,
        ("2 GPUs, the same batch on each. Throughput: examples per second, 2 is linear scaling.",),
        {"over JAX, both on 2 GPUs": _over("JAX"), "throughput of 2 GPUs over 1": _scaling},
    ),
    Topic("conv-h200", "convolutions", ["conv-h200"], _conv_family, (_MEANS,)),
    Topic("conv-cpu", "convolutions", ["conv-cpu"], _conv_family, (_MEANS,)),
    Topic("norm-h200", "norms", ["norm-h200"], _normalized, (_MEANS,)),
    Topic("norm-cpu", "norms", ["norm-cpu"], _normalized, (_MEANS,)),
    Topic("gru-h200", "GRU", ["gru-h200"], _gru, _GRU_ON_GPU, {**_OVER_BOTH, "over cuDNN": _over("cuDNN")}),
    Topic("gru-cpu", "GRU", ["gru-cpu"], _gru, _GRU),
    Topic(
        "per_example",
        "per-example gradients",
        ["per_example-cpu", "per_example-h200"],
        _per_example,
        (),
        {"over JAX, the faster of vmap(grad) and lax.map(grad)": _over("JAX")},
    ),
)


_OTHER_GPUS = ("h100-80gb-hbm3",)


def _all_topics() -> list[Topic]:
    """TOPICS, and those of an H200 with the reports of other GPUs."""
    found = [*TOPICS]
    for topic in TOPICS:
        if topic.name.endswith("-h200"):
            names = [topic.name.replace("h200", gpu) for gpu in _OTHER_GPUS]
            found += [dataclasses.replace(topic, name=name, reports=[name]) for name in names]
    return found


def write(results: Path, folder: Path) -> tuple[list[Path], list[str]]:
    """Draws every topic; returns the files, and the topics whose reports are missing."""
    written, missing = [], []
    for topic in _all_topics():
        paths = [path for name in topic.reports if (path := results / f"{name}.json").exists()]
        if not paths:
            missing.append(topic.name)
            continue
        written.append(folder / f"{topic.name}.png")
        bar_chart.save(chart(topic, [report.load(path) for path in paths]), written[-1])
    return written, missing


def chart(topic: Topic, reports: Sequence[Report]) -> Chart:
    """The chart's rows are sorted by the first panel."""
    every = [{**row, "platform": each["environment"]["platform"]} for each in reports for row in each["rows"]]
    rows = [row for row in every if topic.row(row)]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(topic.row(row), []).append(row)
    bars = {name: [_bar(speedup, those) for speedup in topic.panels.values()] for name, those in groups.items()}
    bars = {name: those for name, those in bars.items() if any(those)}
    names = sorted(bars, key=lambda name: -(bars[name][0].value if bars[name][0] else 0))
    counted = _MEANS in topic.about
    labels = [f"{name} ({len(groups[name])})" if counted else name for name in names]
    panels = [
        Panel(_panel_title(title, rows), [bars[name][i] for name in names])
        for i, title in enumerate(topic.panels)
        if any(bars[name][i] for name in names)
    ]
    hardware = " and ".join(dict.fromkeys(wording.devices(each) for each in reports))
    return Chart(f"Speed-up of jaxgrad: {topic.title} on {hardware}", _subtitle(topic, reports, rows), labels, panels)


def _bar(speedup: _Speedup, rows: Sequence[Row]) -> Bar | None:
    found = [value for row in rows if (value := speedup(row)) is not None]
    return Bar(report.geometric_mean(found), min(found), max(found)) if found else None


def _panel_title(title: str, rows: Sequence[Row]) -> str:
    faster = any({TORCH_COMPILED, TORCH_GRU_GRAPH} & set(row["times_ms"]) for row in rows)
    return title if faster else title.replace("PyTorch", "PyTorch (eager)")


def _about_pytorch(rows: Sequence[Row]) -> list[str]:
    """What PyTorch stands for, where that is not eager PyTorch alone."""
    compiled = [TORCH_COMPILED in row["times_ms"] for row in rows if report.fastest_peer(row, "PyTorch")]
    if not any(compiled):
        return []
    alone = compiled.count(False)
    eager = f"; eager alone in {alone} of {len(compiled)} measurements" if alone else ""
    return [f"PyTorch: the faster of eager and torch.compile{eager}."]


def _subtitle(topic: Topic, reports: Sequence[Report], rows: Sequence[Row]) -> list[str]:
    versions = "; ".join(dict.fromkeys(wording.versions(each) for each in reports))
    found = [*topic.about, *_about_pytorch(rows), f"{versions}; {wording.dates(*reports)}."]
    if lacking := {row["label"] for row in rows if report.lacks_padded_peer(row)}:
        found.append(f"Over JAX, {len(lacking)} causal cases are left out: jnp.pad before jax.lax is not measured yet.")
    return found
