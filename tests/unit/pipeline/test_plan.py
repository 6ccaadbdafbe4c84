"""The cost model against what was measured, and what a plan says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.flops import REFERENCE, TARGETS, optimizer_bytes
from dflash.config import DrafterConfig
from dflash.model import DFlashDraftModel
from env.caches import CacheDirs
from pipeline import __main__ as cli
from pipeline.config import RunConfig, TargetConfig, load_config
from pipeline.errors import ConfigError
from pipeline.plan import costs, points
from pipeline.plan.command import workload
from pipeline.plan.costs import Micro, Seconds
from pipeline.plan.gpus import GPUS, gpu_of
from pipeline.plan.memory import decode_memory, drafter_memory, most_rows
from pipeline.plan.report import Plan, Workload, make_plan, runs_today
from pipeline.plan.shapes import TargetShape, drafter_of, given_shape, local_shape, named_shape
from pipeline.plan.split import Split, Work, best, split_of, splits
from pipeline.plan.table import lines
from tests.drafters import drafter_config
from tests.task_tools import invoke, make_project
from tests.tiny import tiny_target

ROOT = Path(__file__).resolve().parents[3]
PRESET = ROOT / "configs" / "smollm2-gpu.yaml"
BASE = [
    *("data.max_prompt_tokens=128", "data.max_answer_tokens=256", "data.buckets=[384]", "data.features=online"),
    *("train.num_anchors=64", "train.batch_size=64", "train.micro_batch=64", "compile.cuda_graphs=true"),
]
"""What a test depends on of the preset, whose figures may change."""
PAPER = [
    *("data.max_prompt_tokens=1024", "data.max_answer_tokens=2048", "data.buckets=[3072]"),
    *("data.features=online", "compile.cuda_graphs=true"),
    *("train.num_anchors=512", "train.batch_size=64", "train.micro_batch=1"),
]
QWEN, SMOL, H200 = named_shape("qwen3-8b"), named_shape("smollm2"), GPUS["h200"]


def paper(*overrides: str, gpus: int = 8, **load: int) -> Plan:
    config = load_config(PRESET, [*PAPER, *overrides])
    return make_plan(config, QWEN, H200, gpus, workload(config, **{"samples": 800_000, "epochs": 6, **load}))


@pytest.mark.parametrize("point", points.points(), ids=lambda point: f"{point.name} {point.unit}")
def test_the_model_is_as_near_to_what_was_measured_as_it_says(point: points.Point) -> None:
    assert point.holds, f"{point.predicted:.4g} {point.unit} for {point.measured:.4g}: {point.error:+.1f} %"
    assert point.bound <= 15


def test_every_kind_of_point_is_there() -> None:
    """anatomy 6.6: a cost that nobody checked is not known."""
    found = points.points()
    names = " ".join(point.name for point in found)
    for word in ("reference", "8 x 1024", "8192", "4 x 3072", "smollm2 3072", "AdamW", "peak", "decoding", "training"):
        assert word in names
    assert {p.measured for p in found if p.unit == "tokens/s"} >= {83_800, 119_700, 148_600}
    assert sum(not point.fitted for point in found) >= 4


@pytest.mark.parametrize(
    ("constant", "wrong"),
    [
        ("PRODUCTS", 0.85), ("NARROW", 500), ("ATTENTION", 0.40), ("DRAFTER_HOST", 0.007),
        ("OPTIMIZER", 0.57), ("TARGET_HOST", 0.003),
        ("DECODE_LAUNCH", 150e-6), ("DECODE_PASSES", 200), ("DECODE_CACHE", 0.33), ("DECODE_OVERHEAD", 1.25),
        ("OPTIMIZER_HOST", 0.0007),
    ],
)  # fmt: skip
def test_a_constant_that_is_wrong_fails_the_check(
    constant: str, wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--check"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    monkeypatch.setattr(costs, constant, wrong)
    assert cli.main(["plan", "--check"]) == 4
    out, err = capsys.readouterr()
    assert "FAILED" in out and err.startswith("invoke plan --check: the model is off at ")


def test_the_drafters_weights_are_counted_as_the_model_has_them() -> None:
    config = drafter_config()
    norms = [p for p in DFlashDraftModel(config).parameters() if p.dim() == 1]
    every = sum(p.numel() for p in DFlashDraftModel(config).parameters())
    assert costs.drafter_parameters(config) == every - sum(p.numel() for p in norms)


@pytest.mark.parametrize("tied", [False, True])
def test_the_targets_weights_are_counted_as_the_model_has_them(tied: bool, tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "llama", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    shape = local_shape(TargetConfig(source=str(folder)), CacheDirs.from_environment(tmp_path, {}))
    assert shape.tied is tied
    assert shape.parameters == sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert 8.1e9 < QWEN.parameters < 8.3e9 and 134e6 < SMOL.parameters < 135e6


def test_the_reference_step_is_memory_and_time_as_in_the_benchmark() -> None:
    drafter = REFERENCE.drafter()
    micro = Micro(rows=1, length=3072, anchors=512, block=16)
    assert costs.drafter_flops(drafter, micro).total == pytest.approx(71.46e12, rel=1e-3)
    parts = drafter_memory(drafter, QWEN, micro, head_rows=2048)
    assert sum(parts.values()) / 2**30 == pytest.approx(15.6 + 11.5, rel=0.01)
    traffic = optimizer_bytes(costs.drafter_parameters(drafter), rounded_copy=True)
    assert costs.optimizer_seconds(drafter, H200).gpu == pytest.approx(traffic / (0.595 * 4210.7e9))


def test_a_slower_gpu_takes_longer_for_what_it_is_slower_at_and_python_stays() -> None:
    drafter, micro = REFERENCE.drafter(), Micro(rows=1, length=3072, anchors=512, block=16)
    fast, slow = (costs.drafter_seconds(drafter, micro, gpu) for gpu in (H200, replace(H200, matmul=H200.matmul / 2)))
    assert slow.gpu == pytest.approx(2 * fast.gpu) and slow.host == fast.host
    narrow = replace(H200, copy=H200.copy / 2)
    assert costs.decode_seconds(SMOL, 1024, 256, narrow) > 1.4 * costs.decode_seconds(SMOL, 1024, 256, H200)


def test_soft_labels_and_recorded_steps_change_what_they_touch() -> None:
    drafter, micro = REFERENCE.drafter(), Micro(rows=1, length=3072, anchors=512, block=16)
    plain, soft, recorded = (
        costs.drafter_seconds(drafter, micro, H200, **how) for how in ({}, {"soft": True}, {"recorded": True})
    )
    head = costs.drafter_flops(drafter, micro).head / 2
    assert soft.gpu - plain.gpu == pytest.approx(head / (costs.PRODUCTS * H200.matmul)) and soft.host == plain.host
    assert recorded.gpu == plain.gpu and recorded.host == costs.RECORDED_HOST < plain.host


WORK = Work(pieces=8, drafter=Seconds(3, 1), target=Seconds(2, 2), optimizer=Seconds(1, 0.5))


@pytest.mark.parametrize(
    ("targets", "drafters", "shared", "step", "waits"),
    [
        (1, 1, True, 8 * 3 + 8 * 2 + 1, "nobody"),
        (1, 1, False, 8 * 3 + 1, "targets 9,000 ms"),
        (1, 4, False, 8 * 2, "drafters 9,000 ms"),
        (2, 4, False, 8, "drafters 1,000 ms"),
        (4, 4, True, 2 * 3 + 2 * 2 + 1, "nobody"),
        (1, 4, True, 2 * 3 + 8 * 2 + 1, "nobody"),
    ],
)
def test_a_step_takes_as_long_as_the_busier_side(
    targets: int, drafters: int, shared: bool, step: float, waits: str
) -> None:
    split = split_of(WORK, targets, drafters, 0.0, shared=shared)
    assert split.step(one_process=False) == step and split.waits(one_process=False) == waits


def test_one_process_cannot_be_faster_than_its_python() -> None:
    split = split_of(WORK, 4, 4, 0.0, shared=True)
    assert split.step(one_process=True) == split.python == 8 * (1 + 2) + 4 * 0.5
    assert split.limit(one_process=True).startswith("Python") and "products" in split.limit(one_process=False)
    assert split_of(WORK, 1, 4, 0.0, shared=False).limit(one_process=False) == "the target's forward"
    assert "gradients" in split_of(WORK, 8, 8, 50.0, shared=True).limit(one_process=False)


def test_the_best_placing_is_the_fastest_of_all_and_drafters_divide_the_micro_batches() -> None:
    found = list(splits(WORK, 6, [0.0] * 6, cached=False))
    assert {s.drafters for s in found} == {1, 2, 4} and all(s.gpus <= 6 for s in found)
    chosen = best(found, one_process=False)
    assert chosen.step(one_process=False) == min(s.step(one_process=False) for s in found) == 8
    assert (chosen.targets, chosen.drafters, chosen.shared) == (2, 4, False)
    cached = list(splits(replace(WORK, target=Seconds(0, 0)), 6, [0.0] * 6, cached=True))
    assert [(s.targets, s.drafters) for s in cached] == [(0, 1), (0, 2), (0, 4)]


def test_answers_are_as_many_at_once_as_memory_holds() -> None:
    rows = most_rows(QWEN, 3072, 100 * 2**30)
    assert decode_memory(QWEN, rows, 3072) <= 100 * 2**30 < decode_memory(QWEN, rows + 1, 3072)
    assert most_rows(QWEN, 3072, 2 * 2**30) == 0


def test_the_paper_s_run_on_eight_h200() -> None:
    """anatomy 2.1: 800,000 samples, 6 epochs, 3072 tokens, 512 anchors, blocks of 16."""
    plan = paper()
    first = plan.placings[0]
    assert plan.workload.steps == 75_000 and plan.pieces == 64
    assert (first.targets, first.drafters, first.shared) == (8, 8, True)
    assert plan.step == pytest.approx(1.57, rel=0.02) and plan.hours_training == pytest.approx(32.7, rel=0.02)
    assert plan.feature_storage == pytest.approx(800_000 * 3072 * 40 * 1024)
    assert plan.limit.startswith("training, by the drafters' products")
    steps = [s.step(one_process=True) for s in plan.placings]
    assert steps == sorted(steps) and all(s.gpus <= 8 for s in plan.placings)


def test_without_cuda_graphs_python_of_the_one_process_limits_small_micro_batches() -> None:
    plan = paper("compile.cuda_graphs=false")
    assert "Python" in plan.limit and plan.step > 4 * paper().step
    assert plan.faster_micro is not None and plan.faster_micro[0] > 1 and plan.faster_micro[1] < 0.5
    notes = [text for what, text in lines(plan) if what == "note"]
    assert plan.step_of_processes is not None and plan.step_of_processes == pytest.approx(paper().step)
    assert any(note.endswith(f"a step would take {1e3 * plan.step_of_processes:,.0f} ms") for note in notes)
    assert any(f"train.micro_batch={plan.faster_micro[0]} " in note for note in notes)


def test_of_processes_only_placings_with_a_target_for_each_are_there() -> None:
    """As pipeline/config.py demands; of threads any number of targets is one."""
    own = "topology.targets=[cpu]", "topology.drafters=[cpu]"
    processes, threads = (paper(f"topology.workers={kind}", *own) for kind in ("processes", "threads"))
    assert {(s.targets, s.drafters) for s in processes.placings} == {(8, 8), (4, 4), (2, 2), (1, 1)}
    assert any(s.targets != s.drafters for s in threads.placings)
    assert processes.step == processes.step_of_processes == threads.step_of_processes
    assert processes.today == processes.placings[0]
    config = load_config(PRESET, [*PAPER, *own, "topology.workers=processes"])
    assert not runs_today(config, split_of(WORK, 1, 2, 0.0, shared=False))
    assert runs_today(config, split_of(WORK, 2, 2, 0.0, shared=False))


def test_cached_features_need_no_target_beside_and_count_their_disk_and_making() -> None:
    plan = paper("data.features=cached")
    assert plan.target_memory == {} and all(s.targets == 0 for s in plan.placings)
    one = costs.target_seconds(QWEN, Micro(rows=1, length=1536, anchors=0, block=1), H200)
    assert plan.hours_features == pytest.approx(800_000 * one.alone / 3600) and one.alone == one.host > one.gpu
    assert dict(lines(plan))["all features on disk"] == "100.7 TB"


def test_today_is_what_the_configuration_accepts() -> None:
    config = load_config(PRESET, PAPER)
    one, many = (split_of(WORK, targets, 2, 0.0, shared=False) for targets in (1, 2))
    most = RunConfig.model_fields["topology"].annotation.model_fields["targets"].metadata  # type: ignore[union-attr]
    limited = any(getattr(entry, "max_length", None) == 1 for entry in most)
    assert runs_today(config, one) and runs_today(config, many) is not limited
    assert not runs_today(config, split_of(WORK, 1, 3, 0.0, shared=False))  # 64 micro-batches, three drafters
    plan = paper()
    assert plan.today is not None and plan.hours_today is not None
    assert plan.hours_today >= plan.hours


def test_packed_rows_are_fewer_and_have_places_for_every_sample() -> None:
    config = load_config(PRESET, [*BASE, "data.samples_per_row=4", "data.buckets=[512]"])
    load = workload(config, samples=1000, prompt_tokens=56, answer_tokens=100, epochs=2)
    assert load == Workload(samples=1000, prompt_tokens=56, answer_tokens=100, rows=334, steps=2 * 6, own_prompts=822)
    plan = make_plan(config, SMOL, H200, 1, load)
    assert (plan.micro.length, plan.micro.anchors) == (512, 4 * 64)


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["train.precision=fp32"], "train.precision"),
        (["target.dtype=float32"], "target.dtype"),
        (["drafter.head=dflash2"], "drafter.head"),
        (
            ["drafter.sliding_window=64", "drafter.layer_types=[" + ", ".join(["sliding_attention"] * 5) + "]"],
            "drafter",
        ),
        (["drafter.mask_token_id=60000"], "drafter.mask_token_id"),
        (["train.num_anchors=4096", "train.batch_size=256", "train.micro_batch=256"], "train.micro_batch"),
    ],
)
def test_what_the_model_does_not_cover_is_refused_by_its_key(overrides: list[str], where: str) -> None:
    config = load_config(PRESET, [*BASE, *overrides])
    with pytest.raises(ConfigError) as caught:
        make_plan(config, SMOL, H200, 1, workload(config))
    assert caught.value.where == where and caught.value.fix


def test_what_no_gpu_of_the_kind_holds_is_refused() -> None:
    config = load_config(PRESET, [*BASE, "train.batch_size=1", "train.micro_batch=1", "data.features=cached"])
    deep, small = replace(QWEN, layers=72), gpu_of("h200,memory=28")
    with pytest.raises(ConfigError, match="the target and one answer of 384 tokens need more than the 27 GiB of h200"):
        make_plan(config, deep, small, 1, workload(config))
    online = load_config(PRESET, [*BASE, "train.batch_size=1", "train.micro_batch=1"])
    with pytest.raises(ConfigError, match="a micro-batch of 1 rows needs 28 GiB, h200 has 27"):
        make_plan(online, deep, small, 1, workload(online))


def test_gpus_are_named_or_given() -> None:
    assert gpu_of("h200") is GPUS["h200"]
    linked = gpu_of("h200,link=50")
    assert (linked.link, linked.matmul) == (50e9, H200.matmul) and "given: link=50" in linked.basis
    assert gpu_of("mine,matmul=300,copy=2000,memory=80,link=25").memory == 80 * 2**30
    assert GPUS["h100"].matmul == pytest.approx(702.9e12) and "data sheet" in GPUS["b200"].basis
    for wrong, part in (("h300", "'h300' is not known"), ("h200,speed=3", "speed=3"), ("h200,link=x", "link=x")):
        with pytest.raises(ConfigError, match=part):
            gpu_of(wrong)
    with pytest.raises(ConfigError, match="not above 0"):
        gpu_of("h200,link=-1")


def test_a_shape_is_named_or_given() -> None:
    assert given_shape("qwen3-8b") == QWEN
    text = "layers=36,hidden=4096,heads=32,kv-heads=8,head-dim=128,ffn=12288,vocab=151936"
    assert given_shape(text) == QWEN
    assert given_shape("layers=2,hidden=64,heads=4,ffn=128,vocab=100,tied=1") == TargetShape(
        layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100, tied=True
    )
    for wrong in ("qwen4", "layers=0", "layers=36,depth=3", "layers=36,hidden=4096"):
        with pytest.raises(ConfigError) as caught:
            given_shape(wrong)
        assert caught.value.where == "--shape"


def test_the_shape_of_a_target_that_is_not_here_must_be_said_and_nothing_is_downloaded(tmp_path: Path) -> None:
    caches = CacheDirs.from_environment(tmp_path, {})
    absent = TargetConfig(source="owner/model", revision="0" * 40)
    for config in (TargetConfig(source=str(tmp_path / "none")), TargetConfig(source="smollm2-135m-instruct"), absent):
        with pytest.raises(ConfigError, match="is not on this machine") as caught:
            local_shape(config, caches)
        assert all(name in caught.value.fix for name in TARGETS)


def test_the_drafter_is_the_one_that_the_run_would_train() -> None:
    drafter = drafter_of(load_config(PRESET, [*BASE, "drafter.num_layers=2"]), QWEN)
    assert isinstance(drafter, DrafterConfig)
    assert (drafter.num_hidden_layers, drafter.hidden_size, drafter.intermediate_size) == (2, 4096, 12288)
    assert drafter.target_layer_ids == (1, 9, 17, 25, 33)


def test_the_command_prints_one_table_and_writes_the_same_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "plan.json"
    sizes = ["--gpus", "8", "--shape", "qwen3-8b", "--samples", "800000", "--epochs", "6", "--json", str(out)]
    assert cli.main(["plan", "--config", str(PRESET), *sizes, *PAPER]) == 0
    printed = capsys.readouterr().out
    rows: dict[str, Any] = json.loads(out.read_text())
    assert "best placing" in printed and "what limits it" in printed and rows["limit"] in printed
    assert rows["placings"][0]["words"] in printed and rows["workload"]["steps"] == 75_000
    assert rows["config"]["train"]["num_anchors"] == 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "qwen4"], "--shape: 'qwen4' is no part of a shape."),
        (["--shape", "smollm2", "--gpu", "h300"], "--gpu: 'h300' is not known."),
        (
            ["--shape", "smollm2", "--prompt-tokens", "500"],
            "--prompt-tokens: 500 is above data.max_prompt_tokens, 128.",
        ),
        (["--shape", "smollm2", "--json", "nowhere/at/all.json"], "--json: nowhere/at/all.json is in no folder"),
        (["--shape", "smollm2", "train.stepz=1"], "override train.stepz=1: train.stepz: unknown key."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--config", str(PRESET), *arguments, *BASE]) == 2
    err = capsys.readouterr().err
    assert err.startswith(message) and err.count("\n") == 1


def test_the_task_hands_its_options_to_the_pipeline(tmp_path: Path, repository: Path) -> None:
    project = make_project(tmp_path, repository)
    done = invoke(project, "plan", "--gpus", "8", "--shape", "qwen3-8b", "--epochs", "6", "--set", "train.steps=9")
    wanted = "plan --config configs/smollm2-gpu.yaml --gpu h200 --gpus 8 --shape qwen3-8b --epochs 6 train.steps=9"
    assert (done.stdout, done.returncode) == (f"argv {wanted}\n", 0)
    assert invoke(project, "plan", "--check").stdout == "argv plan --check\n"


def test_a_split_says_itself_in_words() -> None:
    def words(targets: int, drafters: int, shared: bool) -> str:
        split: Split = split_of(WORK, targets, drafters, 0.0, shared=shared)
        return split.words()

    assert words(1, 1, True) == "1 GPU with a target and a drafter"
    assert words(4, 4, True) == "4 GPUs with a target and a drafter each"
    assert words(1, 4, False) == "1 target + 4 drafters"
    assert words(2, 4, True) == "4 drafters, 2 of their GPUs with a target too"
    assert words(0, 2, True) == "2 drafters, features from disk"
