"""Whether a downloaded checkpoint is whole and the official one, told in seconds from file headers alone.

`python -m python_backend_models.checkpoint_report DIR [--any-size]` prints a line per part and everything
that is missing or differs; exit code 0 if nothing is, 1 otherwise. No weight is read, so damage inside a file
that has the right length is not seen.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from python_backend_models import official
from python_backend_models.checkpoint import (
    COMPONENTS,
    CheckpointError,
    Component,
    read_config,
    survey_component,
)
from python_backend_models.contract import SPECIAL_TOKEN_IDS
from python_backend_models.tokenizer import TextTokenizer, TokenizerMismatchError

TOKENIZER_FOLDER: Final = "tokenizer"
TOKENIZER_FILE: Final = "tokenizer.json"
NAME: Final = "MiniMaxAI/MiniMax-Music3"
# What a clone without Git LFS leaves in a weight file's place begins with this.
_LFS_POINTER: Final = b"version https://git-lfs"

# Widths that two components must agree on: the tensor that goes from one to the other.
_JOINTS: Final = (
    ("rvq_depth_decoder", "hidden_size", "language_model", "hidden_size"),
    ("condition_encoder", "condition_hidden_dim", "language_model", "hidden_size"),
    ("transformer", "condition_dim", "condition_encoder", "out_dim"),
    ("vocoder", "latent_channels", "transformer", "in_channels"),
)


@dataclass
class PartReport:
    """One folder of the checkpoint.

    Attributes:
        contents: what was found, in words.
        stored_bytes: of its weight files.
        problems: everything that is missing or differs.
    """

    folder: str
    contents: str = ""
    stored_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def inspect_checkpoint(root: Path, *, any_size: bool = False) -> list[PartReport]:
    """Report on every part of the checkpoint that is served.

    Args:
        any_size: accept other sizes and float types than the official ones if the parts fit together.
    """
    reports = [_inspect_component(root, component, any_size=any_size) for component in COMPONENTS]
    by_folder = {report.folder: report for report in reports}
    for folder, problem in _misfits(root):
        by_folder[folder].problems.append(problem)
    return [*reports, _inspect_tokenizer(root)]


def _inspect_component(root: Path, component: Component[Any], *, any_size: bool) -> PartReport:
    folder = component.folder
    report = PartReport(folder)
    report.problems += _pointers(root / folder)
    if not any_size:
        report.problems += _config_differences(root, folder)
    try:
        survey = survey_component(root, component)
    except CheckpointError as error:
        report.problems.append(str(error))
        return report
    files = set(survey.files.values())
    report.stored_bytes = sum(path.stat().st_size for path in files)
    types = sorted(set(survey.dtypes.values()))
    report.contents = f"{len(survey.files)} tensors, {'/'.join(types) or 'none'}, in {_count(files, 'file')}"
    report.problems += survey.faults
    report.problems += [f"tensor {name} is missing" for name in survey.missing]
    report.problems += [f"tensor {name} is not one of this model's" for name in survey.extra]
    wanted = official.DTYPES[folder]
    if not any_size:
        others = sorted(name for name, dtype in survey.dtypes.items() if dtype != wanted)
        report.problems += [f"tensor {name} is {survey.dtypes[name]}, not {wanted}" for name in others]
    return report


def _pointers(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                yield f"{path.name} is a Git LFS pointer: its weights were not downloaded"


def _config_differences(root: Path, folder: str) -> Iterator[str]:
    try:
        config = read_config(root, folder)
    except CheckpointError:
        return  # the survey says so
    yield from _differences(config, official.CONFIGS[folder], "config.json: ")


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in wanted.items():
        if key not in found:
            yield f"{prefix}{key} is missing, must be {value}"
        elif isinstance(value, Mapping) and isinstance(found[key], Mapping):
            yield from _differences(found[key], value, f"{prefix}{key}.")
        elif found[key] != value:
            yield f"{prefix}{key} is {found[key]}, must be {value}"


def _misfits(root: Path) -> Iterator[tuple[str, str]]:
    for folder, key, other_folder, other_key in _JOINTS:
        try:
            width = read_config(root, folder)[key]
            other = read_config(root, other_folder)[other_key]
        except (CheckpointError, KeyError):
            continue  # said of the component itself
        if width != other:
            yield folder, f"config.json: {key} is {width}, but {other_folder}'s {other_key} is {other}"


def _inspect_tokenizer(root: Path) -> PartReport:
    report = PartReport(TOKENIZER_FOLDER)
    path = root / TOKENIZER_FOLDER / TOKENIZER_FILE
    try:
        TextTokenizer(path)
    except OSError as error:
        report.problems.append(f"{path}: {error.strerror}")
    except TokenizerMismatchError as error:
        report.problems.append(str(error))
    else:
        report.contents = f"the {len(SPECIAL_TOKEN_IDS)} special ids"
    return report


def _count(things: Sequence[Any] | set[Any], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def lines(reports: Sequence[PartReport], *, any_size: bool) -> Iterator[str]:
    """The report for a person."""
    for report in reports:
        size = f"{report.stored_bytes / 1e9:6.2f} GB" if report.stored_bytes else " " * 9
        verdict = "ok" if not report.problems else _count(report.problems, "problem")
        yield f"{report.folder:<18} {size}  {report.contents or '-':<36}  {verdict}"
        yield from (f"    {problem}" for problem in report.problems)
    bad = [problem for report in reports for problem in report.problems]
    total = sum(report.stored_bytes for report in reports) / 1e9
    if bad:
        yield f"{_count(bad, 'problem')}: this checkpoint can't be served as it is"
    elif any_size:
        yield f"complete: {total:.2f} GB; sizes and types were not compared with the official ones"
    else:
        revision = official.REVISION[:8]
        yield f"complete: {total:.2f} GB, {NAME} (revision {revision}) as far as file headers tell"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m python_backend_models.checkpoint_report")
    parser.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint folder")
    parser.add_argument("--any-size", action="store_true", help="do not compare sizes with the official ones")
    arguments = parser.parse_args(argv)
    if not arguments.directory.is_dir():
        print(f"there is no folder {arguments.directory}", file=sys.stderr)
        return 1
    reports = inspect_checkpoint(arguments.directory, any_size=arguments.any_size)
    print("\n".join(lines(reports, any_size=arguments.any_size)))
    return 1 if any(report.problems for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
