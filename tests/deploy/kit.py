"""What the deploy tests share: the runner, the tools, and the manifests as Kustomize builds them."""
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TOOLS = os.path.join(ROOT, ".cache", "deploy-tools")  # where tests/deploy/tools puts what Debian does not have
KUSTOMIZE = os.path.join(ROOT, "deploy", "kustomize")

try:
    import yaml
except ImportError:
    yaml = None


class Skip(Exception):
    """This test cannot run here; the text says why."""


def main(tests):
    """Runs the functions, prints a line for each that fails or is skipped, and the closing line."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for test in tests:
        try:
            if yaml is None:
                raise Skip("python3-yaml is not installed: tests/setup")
            test()
            counts["passed"] += 1
        except Skip as reason:
            print(f"SKIP {test.__name__}: {reason}")
            counts["skipped"] += 1
        except AssertionError as error:
            print(f"FAIL {test.__name__}: {error}")
            counts["failed"] += 1
        except Exception:  # a test's own mistake is a failure, and the others still run
            print(f"FAIL {test.__name__}:\n{traceback.format_exc()}")
            counts["failed"] += 1
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    sys.exit(1 if counts["failed"] else 0)


def tool(name):
    """The path of a program of the system or of tests/deploy/tools; Skip when it is nowhere."""
    for path in (os.path.join(TOOLS, "bin", name), shutil.which(name), f"/usr/bin/{name}", f"/usr/sbin/{name}"):
        if path and os.access(path, os.X_OK):
            return path
    raise Skip(f"{name} is not installed: tests/setup")


def run(*command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, **options)


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


@functools.lru_cache(None)
def kustomize():
    """The command that builds a folder. Debian 12's kubectl (1.20) carries a Kustomize that is too old for these files."""
    try:
        return [tool("kustomize"), "build"]
    except Skip:
        pass
    kubectl = tool("kubectl")
    out = run(kubectl, "version", "--client", "-o", "json").stdout
    minor = int(re.sub(r"\D", "", json.loads(out[out.index("{"):])["clientVersion"]["minor"]))
    if minor < 28:
        raise Skip(f"kubectl 1.{minor} has a Kustomize before version 5")
    return [kubectl, "kustomize"]


@functools.lru_cache(None)
def build(folder):
    """The objects of deploy/kustomize/FOLDER."""
    result = subprocess.run([*kustomize(), os.path.join(KUSTOMIZE, folder)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"kustomize does not build {folder}: {result.stderr.strip()}"
    return list(yaml.safe_load_all(result.stdout))


def is_built_alone(folder):
    return folder.startswith(("overlays/", "examples/")) or folder == "monitoring"


def folders():
    """Everything that a user gives to `kubectl apply -k`."""
    found = []
    for path, _, names in os.walk(KUSTOMIZE):
        folder = os.path.relpath(path, KUSTOMIZE)
        if "kustomization.yaml" in names and is_built_alone(folder):
            found.append(folder)
    return sorted(found)


def templates(objects):
    """(object, pod template) of everything that makes pods."""
    for item in objects:
        spec = item.get("spec") or {}
        if "template" in spec:
            yield item, spec["template"]
        for template in (spec.get("leaderWorkerTemplate") or {}).values():
            if isinstance(template, dict):
                yield item, template


def containers(template):
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def settings(objects):
    """{name of a ConfigMap: its DSAD_ variables}"""
    found = {}
    for item in objects:
        if item["kind"] == "ConfigMap":
            values = {k: v for k, v in item.get("data", {}).items() if k.startswith("DSAD_")}
            if values:
                found[item["metadata"]["name"]] = values
    return found
