"""What must not be in the product's code, nor in its list of dependencies."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("python_backend_models", "client", "model_repository")
    for path in (ROOT / folder).rglob("*.py")
)
# Ways in which data becomes code: formats that carry it, and calls that run text.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "torch.load", "numpy.load", "np.load", "yaml.load", "os.system"}
KEYWORDS = {"trust_remote_code", "allow_pickle"}


def findings(tree: ast.AST) -> list[str]:
    """Names of what is forbidden in a module."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [each.name for each in names if each.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                found.append(module)
            case ast.Call(func=function, keywords=keywords):
                if (name := ast.unparse(function)) in CALLS:
                    found.append(name)
                for keyword in keywords:
                    if keyword.arg in KEYWORDS or (
                        keyword.arg == "shell" and ast.unparse(keyword.value) == "True"
                    ):
                        found.append(f"{name}({keyword.arg}=...)")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_data_becomes_code(path: Path) -> None:
    assert findings(ast.parse(path.read_text())) == []


def test_the_search_finds_what_it_looks_for() -> None:
    for line in (
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "eval(text)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "subprocess.run(text, shell=True)",
    ):
        assert findings(ast.parse(line)), line
    assert findings(ast.parse("re.compile('x'); model.eval(); call.exec()")) == []


def test_every_dependency_is_pinned_to_one_version() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:requires|dependencies) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    for section in ("project.optional-dependencies", "dependency-groups"):
        lists.append(text.split(f"[{section}]\n")[1].split("\n[")[0])
    lines = [line for each in lists for line in each.splitlines() if not line.lstrip().startswith("#")]
    requirements = re.findall(r'"([^"]+)"', "\n".join(lines))
    assert len(requirements) > 15
    for requirement in requirements:
        assert re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.+]+", requirement), requirement
