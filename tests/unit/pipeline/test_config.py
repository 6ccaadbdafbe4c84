"""What a person gets for a configuration that cannot be used: one line that names the place and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from pipeline.config import DataConfig, RunConfig, TopologyConfig, load_config
from pipeline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def _complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    text = str(caught.value)
    assert "\n" not in text
    return text


def _edited(tmp_path: Path, old: str, new: str) -> Path:
    text = QUICKSTART.read_text()
    assert old in text
    path = tmp_path / "edited.yaml"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_preset_loads(path: Path) -> None:
    config = load_config(path)
    assert config.run_id().startswith(config.name + "-")


def test_an_unknown_key_offers_the_nearest_name_with_its_line(tmp_path: Path) -> None:
    path = _edited(tmp_path, "  steps:", "  stpes:")
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "stpes" in text)
    assert _complaint(path) == f"{path}:{line}: train.stpes: unknown key. Did you mean steps?"


def test_a_key_in_the_wrong_section_is_sent_to_its_own() -> None:
    assert "Did you mean drafter.block_size?" in _complaint(QUICKSTART, "block_size=4")


def test_a_key_like_no_other_gets_the_list_of_known_ones() -> None:
    assert "Known here: source, revision, dtype." in _complaint(QUICKSTART, "target.zzzzzz=1")


def test_an_unknown_key_inside_a_list_is_named() -> None:
    assert "data.train.0.cuont: unknown key. Did you mean count?" in _complaint(QUICKSTART, "data.train.0.cuont=1")


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    data = yaml.safe_load(QUICKSTART.read_text())
    del data["drafter"]
    path = tmp_path / "no-drafter.yaml"
    path.write_text(yaml.safe_dump(data))
    assert "drafter: is required" in _complaint(path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps='4'", "train.steps: must be a whole number, got '4'. Write it without quotes."),
        ("train.steps=3.0", "train.steps: must be a whole number, got 3.0. Write 3."),
        ("train.steps=true", "train.steps: must be a whole number, got true."),
        ("train.steps=many", "train.steps: must be a whole number, got 'many'."),
        ("train.learning_rate='1e-3'", "train.learning_rate: must be a number, got '1e-3'."),
        ("train.learning_rate=.nan", "train.learning_rate: must be a finite number, got nan."),
        ("train.learning_rate=0", "train.learning_rate: must be greater than 0, got 0."),
        ("train.betas=0.9", "train.betas: must be a list, got 0.9. Put it in brackets: [a, b]."),
        ("train.betas=[0.9]", "train.betas.1: the list has too few entries. Give at least 2."),
        ("train.betas=[0.9, 0.95, 1]", "train.betas: must have at most 2 entries, got [0.9, 0.95, 1]."),
        ("train.loss=mse", "train.loss: must be 'decay' or 'dpace', got 'mse'."),
        ("train.batch_size=7", "train: batch_size 7 is not a multiple of micro_batch 2."),
        ("drafter.block_size=1", "drafter.block_size: must be at least 2, got 1."),
        ("data.train=[]", "data.train: must not be empty, got []."),
        ("data.buckets=[64]", "data: the largest bucket 64 does not hold max_prompt_tokens + max_answer_tokens = 128"),
        ("train.betas=[0.9, 1]", "train: betas [0.9, 1.0] must be at least 0 and below 1"),
        ("topology.drafters=[gpu, cpu]", "topology.drafters.0: 'gpu' is no device: name cpu, or cuda:0"),
        ("topology.drafters=[]", "topology.drafters"),
        (
            'topology.targets=["cuda:0", "cuda:1", "cuda:0"]',
            "topology: targets names cuda:0 more than once, and a second copy there would only cost memory",
        ),
        ("topology.targets=[]", "topology.targets: must not be empty"),
        ('topology.targets=["cuda:00"]', "topology.targets.0: 'cuda:00' is no device: name cpu, or cuda:0"),
        ("seed=-1", "seed"),
        ("data.buckets=[256, 128]", "data: buckets [256, 128] must be positive and ascending"),
        ("target.revision=12345", "target.revision: must be text, got 12345. Put it in quotes."),
        ("drafter.is_causal=1", "drafter.is_causal: must be true or false, got 1."),
        ("train=3", "train: must be a section with fields of its own, got 3."),
        ("name=Not A Name", "name: must match"),
    ],
)
def test_a_wrong_value_is_shown_with_what_it_must_be(override: str, expected: str) -> None:
    text = _complaint(QUICKSTART, override)
    assert text.startswith(f"override {override}: ")
    assert expected in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps", "is not section.field=value"),
        ("=4", "is not section.field=value"),
        ("train..steps=4", "is not section.field=value"),
        ("train.steps=[1", "is not YAML"),
        ("seed.value=4", "seed has no fields"),
        ("data.train.7.count=4", "data.train is a list of 1, '7' is no entry of it"),
        ("train.step=4", "train.step: unknown key. Did you mean steps?"),
    ],
)
def test_an_override_that_cannot_be_used_is_quoted(override: str, expected: str) -> None:
    text = _complaint(QUICKSTART, override)
    assert override in text
    assert expected in text


def test_drafters_that_would_get_no_micro_batch_are_refused() -> None:
    text = _complaint(QUICKSTART, "train.batch_size=2")
    assert "train.batch_size / train.micro_batch = 1 micro-batches do not divide among 2 drafters" in text


def test_any_number_of_targets_is_taken_and_a_drafters_device_may_be_named_again() -> None:
    online, targets = "data.features=online", 'topology.targets=["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]'
    config = load_config(QUICKSTART, [online, targets, 'topology.drafters=["cuda:5", "cuda:5"]'])
    assert config.topology.targets == tuple(f"cuda:{i}" for i in range(5))
    assert config.topology.drafters == ("cuda:5", "cuda:5")
    text = _complaint(QUICKSTART, "data.features=cached", 'topology.targets=["cuda:0", "cuda:1"]')
    assert "data.features cached are made by one target, and topology.targets are cuda:0, cuda:1: name one" in text


def test_overrides_reach_sections_lists_and_sections_that_the_file_leaves_out() -> None:
    config = load_config(
        QUICKSTART, ["train.steps=7", "data.train.0.count=3", "verify.min_tau=1.5", "train.betas=[0.5, 0]"]
    )
    assert (config.train.steps, config.data.train[0].count, config.verify.min_tau) == (7, 3, 1.5)
    assert config.train.betas == (0.5, 0.0)


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (["topology.drafters=[cpu]"], 512),
        (['topology.drafters=["cuda:0"]'], 2048),
        (['topology.drafters=["cuda:0"]', "train.soft_weight=0.5"], 512),  # these hold several float32 logits a row
        (['topology.drafters=["cuda:0"]', "drafter.head=markov"], 512),
        (["topology.drafters=[cpu]", "train.head_chunk_rows=100"], 100),
        (['topology.drafters=["cuda:0"]', "train.head_chunk_rows=100"], 100),
    ],
)
def test_a_gpus_chunk_of_logits_is_larger_unless_the_configuration_says_how_large(
    overrides: list[str], rows: int
) -> None:
    assert load_config(QUICKSTART, overrides).head_rows == rows


def test_a_number_with_an_exponent_needs_no_dot() -> None:
    # YAML 1.1, which PyYAML follows, reads 3e-3 as text.
    assert yaml.safe_load("3e-3") == "3e-3"
    assert load_config(QUICKSTART, ["train.learning_rate=3e-3"]).train.learning_rate == 0.003


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("name: a\nseed: 0\ntrain: {steps: 3\ndata: 4\n")
    assert _complaint(path).startswith(f"{path}:4: is not YAML (")


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(QUICKSTART.read_text() + "seed: 1\n")
    text = _complaint(path)
    assert "seed is given twice (first on line 3)" in text
    assert yaml.safe_load(path.read_text())["seed"] == 1  # PyYAML alone takes the last one in silence


def test_an_alias_that_contains_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.yaml"
    path.write_text("name: &a [*a]\n")
    assert "contains itself" in _complaint(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "must be a mapping"),
        (b"- a\n", "must be a mapping"),
        (b"name: \xff\xfe", "is not UTF-8"),
        (b"1: 2\n", "the key is not text"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    if content == b"1: 2\n":
        path.write_text(QUICKSTART.read_text() + "1: 2\n")
    assert expected in _complaint(path)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    assert "no such configuration file" in _complaint(tmp_path / "nowhere.yaml")


def test_a_configuration_cannot_be_changed_after_it_was_checked() -> None:
    config = load_config(QUICKSTART)
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 5  # type: ignore[misc]


def test_a_list_given_in_code_becomes_a_tuple() -> None:
    data = {
        "train": [{"source": "wiki", "count": 1}],
        "out_of_domain": {"source": "wiki", "count": 1},
        "buckets": [8, 160],
    }
    assert DataConfig.model_validate(data).buckets == (8, 160)


def test_the_same_configuration_has_the_same_id_and_another_has_another() -> None:
    first, again = load_config(QUICKSTART), load_config(QUICKSTART, ["seed=0"])
    other = load_config(QUICKSTART, ["seed=1"])
    assert first.run_id() == again.run_id() != other.run_id()


def test_what_changes_no_bit_leaves_the_id_as_it_is() -> None:
    """A run that ran out of memory goes on in its folder with the optimizer sharded."""
    processes = "topology.workers=processes"
    whole, sharded = (
        load_config(QUICKSTART, [processes, f"topology.shard_optimizer={value}"]) for value in ("false", "true")
    )
    assert whole.run_id() == sharded.run_id() != load_config(QUICKSTART).run_id() and whole != sharded


def test_the_id_survives_writing_and_reading_the_resolved_configuration(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, ["train.learning_rate=1e-5", "topology.drafters=[cpu]"])
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(path) == config
    assert load_config(path).run_id() == config.run_id()
    assert isinstance(config, RunConfig)


@pytest.mark.parametrize("value", ["2020-13-45", "!!bool maybe", "9" * 5000, "[" * 3000 + "]" * 3000])
def test_a_value_that_yaml_cannot_make_is_a_config_error(tmp_path: Path, value: str) -> None:
    assert "edited.yaml: a value cannot be read (" in _complaint(_edited(tmp_path, "seed: 0", f"seed: {value}"))
    assert "is not YAML" in _complaint(QUICKSTART, f"seed={value}")


def test_aliases_of_aliases_are_refused_before_they_grow(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path.write_text("\n".join(lines))
    assert "holds more than 10000 values, aliases counted" in _complaint(path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("drafter.intermediate_size=0", "must be greater than 0"),
        ("drafter.layer_types=[]", "must not be empty"),
        ("drafter.target_layer_ids=[]", "must not be empty"),
        ("drafter.block_size=129", "longer than the largest of data.buckets, 128"),
        (f"seed={2**63}", "must be less than"),
        (f"name={'a' * 101}", "name"),
        ("data.train.\u00b2.count=5", "is no entry of it"),
    ],
)
def test_values_that_would_be_ignored_or_fail_late_are_refused(override: str, expected: str) -> None:
    assert expected in _complaint(QUICKSTART, override)


@pytest.mark.parametrize("drafters", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"]])
def test_processes_with_one_gpu_among_them_are_refused_and_threads_are_not(drafters: list[str]) -> None:
    """NCCL refuses two ranks on one GPU, and says so only when all have compiled."""
    with pytest.raises(ValidationError, match="with workers processes each needs a GPU of its own"):
        TopologyConfig(drafters=tuple(drafters), workers="processes")
    TopologyConfig(drafters=tuple(drafters))
    TopologyConfig(drafters=("cuda:0", "cuda:1"), workers="processes")
    TopologyConfig(drafters=("cpu", "cpu"), workers="processes")


@pytest.mark.parametrize(
    ("targets", "drafters"),
    [(5, 3), (1, 2), (3, 2)],
)
def test_processes_that_would_share_a_target_or_leave_one_idle_are_refused_and_threads_are_not(
    targets: int, drafters: int
) -> None:
    """A process's target is its own: a further one would never run, and a missing one be a second copy unseen."""
    homes = f"topology.targets={[f'cuda:{i}' for i in range(targets)]}"
    workers = f"topology.drafters={[f'cuda:{5 + i}' for i in range(drafters)]}"
    given = [homes, workers, "data.features=online", "train.batch_size=12", "train.micro_batch=2"]
    assert load_config(QUICKSTART, given).topology.workers == "threads"
    text = _complaint(QUICKSTART, *given, "topology.workers=processes")
    assert f"topology.targets names {targets}, topology.drafters {drafters}: of processes with features online" in text
    assert f"so name {drafters}" in text


@pytest.mark.parametrize("home", ["cpu", "cuda:1"])
def test_every_process_may_have_its_copy_of_the_target_on_one_device_if_that_is_said(home: str) -> None:
    """Two copies on a GPU are named twice, so that their memory is no surprise."""
    drafters = ["cuda:2", "cuda:3"] if home != "cpu" else ["cpu", "cpu"]
    given = ["data.features=online", f"topology.targets=[{home}, {home}]", f"topology.drafters={drafters}"]
    config = load_config(QUICKSTART, [*given, "topology.workers=processes"])
    assert config.topology.targets == (home, home)
    assert f"targets names {home} more than once" in _complaint(QUICKSTART, *given)
