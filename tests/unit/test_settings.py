"""The reader of knobs: where a value comes from, and what is refused by name."""

import dataclasses
from pathlib import Path

import pytest

from python_backend_models.settings import (
    DitSettings,
    Music3Settings,
    SettingsError,
    StageSettings,
    TalkerSettings,
    VocoderSettings,
    read,
)
from tests.unit import fake_triton

KINDS: dict[str, type[StageSettings]] = {
    "music3": Music3Settings,
    "talker": TalkerSettings,
    "dit": DitSettings,
    "vocoder": VocoderSettings,
}


def test_defaults_without_any_source() -> None:
    assert read(TalkerSettings, "talker", {}, {}) == TalkerSettings()


def test_the_most_particular_source_wins() -> None:
    parameters = {"live_songs": "3"}
    environment = {"MUSIC3_LIVE_SONGS": "4", "MUSIC3_TALKER_LIVE_SONGS": "5"}
    assert read(TalkerSettings, "talker", {}, {}).live_songs == 8
    assert read(TalkerSettings, "talker", parameters, {}).live_songs == 3
    assert read(TalkerSettings, "talker", parameters, {"MUSIC3_LIVE_SONGS": "4"}).live_songs == 4
    assert read(TalkerSettings, "talker", parameters, environment).live_songs == 5
    assert read(Music3Settings, "music3", parameters, environment).live_songs == 4


def test_an_empty_value_is_no_value() -> None:
    assert read(Music3Settings, "music3", {"live_songs": "2"}, {"MUSIC3_LIVE_SONGS": ""}).live_songs == 2


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"live_song": "3"}, ["unknown parameter 'live_song'", "live_songs"]),
        ({"live_songs": "three"}, ["live_songs", "'three'", "whole number"]),
        ({"live_songs": "2.5"}, ["live_songs", "whole number"]),
        ({"live_songs": "0"}, ["live_songs is 0", "1 to 64"]),
        ({"live_songs": "65"}, ["live_songs is 65", "1 to 64"]),
        ({"stage_limit_s": "soon"}, ["stage_limit_s", "a number"]),
        ({"stage_limit_s": "nan"}, ["stage_limit_s is nan", "at least 1"]),
        ({"waiting_songs": "-1"}, ["waiting_songs is -1", "at least 0"]),
        ({"profile": "vllm"}, ["profile is 'vllm'", "vllm-omni, sglang-omni"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_is_allowed(
    parameters: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        read(Music3Settings, "music3", parameters, {})
    assert str(caught.value).startswith("music3: ")
    for word in words:
        assert word in str(caught.value)


def test_a_wrong_value_in_the_environment_is_named_by_its_variable() -> None:
    with pytest.raises(SettingsError, match="MUSIC3_TALKER_KV_TOKENS is 'many'"):
        read(TalkerSettings, "talker", {}, {"MUSIC3_TALKER_KV_TOKENS": "many"})


def test_tritons_own_parameters_pass() -> None:
    parameters = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", "EXECUTION_ENV_PATH": "x"}
    assert read(DitSettings, "dit", parameters, {}) == DitSettings()


def test_a_fault_needs_a_word_in_the_environment() -> None:
    parameters = {"fault": "nan_latents@1"}
    with pytest.raises(SettingsError, match=r"dit: fault is set.*MUSIC3_TEST_FAULTS=1"):
        read(DitSettings, "dit", parameters, {})
    with pytest.raises(SettingsError):
        read(DitSettings, "dit", {}, {"MUSIC3_DIT_FAULT": "x", "MUSIC3_TEST_FAULTS": "0"})
    assert read(DitSettings, "dit", parameters, {"MUSIC3_TEST_FAULTS": "1"}).fault == "nan_latents@1"


def test_the_checkpoint_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="MUSIC3_CHECKPOINT"):
        _ = StageSettings().checkpoint_path
    missing = tmp_path / "nowhere"
    with pytest.raises(SettingsError, match=str(missing)):
        _ = StageSettings(checkpoint=str(missing)).checkpoint_path
    assert StageSettings(checkpoint=str(tmp_path)).checkpoint_path == tmp_path


@pytest.mark.parametrize("stage", KINDS)
def test_every_setting_has_a_meaning_and_an_allowed_default(stage: str) -> None:
    for field in dataclasses.fields(KINDS[stage]):
        assert field.metadata["meaning"]
        assert type(field.default) in (str, int, float)
        if field.default != "":
            read(KINDS[stage], stage, {field.name: str(field.default)}, {})


@pytest.mark.parametrize("stage", KINDS)
def test_the_committed_configs_hold_no_wrong_parameter(stage: str) -> None:
    parameters = {
        name: value.string_value for name, value in fake_triton.read_config(stage).parameters.items()
    }
    read(KINDS[stage], stage, parameters, {})


def test_places_of_the_front_door_fit_the_talkers_and_tritons() -> None:
    """By default no song that got a place may find none further on: it would hold a thread and wait."""
    talker = fake_triton.read_config("talker")
    places = talker.sequence_batching.oldest.max_candidate_sequences
    assert Music3Settings().live_songs <= TalkerSettings().live_songs <= places
    assert Music3Settings().live_songs < 32  # threads of Triton's pool for calls between models
    most = {f.name: f.metadata["most"] for f in dataclasses.fields(TalkerSettings)}["live_songs"]
    assert most <= places
    assert most <= talker.max_batch_size
