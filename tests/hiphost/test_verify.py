#!/usr/bin/env python3
"""kernels/hip/verify: what it runs, what it makes of the results, and how it ends. The programs that it runs are stand-ins of this
test's, but for one run of the real dsk-check where there is no AMD GPU.

usage: test_verify.py VERIFY DSK_CHECK
Ends in `N passed, N failed, N skipped`.
"""
import os
import subprocess
import sys
import tempfile

VERIFY, DSK_CHECK = sys.argv[1:3]
passed, failed, skipped = [], [], []

GOOD = {
    "kernels/tools/dsk-check": 'echo "device: Fake MI300, gfx942, GPU-1"; echo "$*" >>"$0.args"; echo "10 passed, 0 failed"',
    "kernels/tools/dsk-bench": 'echo "operation layout"; echo "attend scaled 9.5"; echo "$*" >>"$0.args"\n'
    'while [ $# -gt 0 ]; do [ "$1" = --json ] && echo "{}" >"$2"; shift; done',
    "tests/kernels/kernels_gpu": 'echo "$DSA_TEST_GPU" >"$0.args"; echo "60 passed, 0 failed, 0 skipped"',
    "tests/kernels/kernels_gpu_attend": 'echo "56 passed, 0 failed, 0 skipped"',
}


def build(folder, **changes):
    """A build folder of stand-ins; changes: by the program's name, another script or None."""
    scripts = {path: changes.get(os.path.basename(path).replace("-", "_"), text) for path, text in GOOD.items()}
    for path, text in scripts.items():
        full = os.path.join(folder, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        if text is not None:
            with open(full, "w", encoding="utf-8") as f:
                f.write("#!/bin/sh\n" + text + "\n")
            os.chmod(full, 0o755)


def arguments(folder, path):
    with open(os.path.join(folder, path + ".args"), encoding="utf-8") as f:
        return f.read()


def run(*arguments_):
    done = subprocess.run([VERIFY, *arguments_], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def expect(name, code, got, *words):
    missing = [w for w in words if w not in got[1]]
    if got[0] == code and not missing:
        passed.append(name)
    else:
        failed.append(name)
        print("FAIL %s: exit status %d, without %s:\n%s" % (name, got[0], missing, got[1]))


def check(name, is_true, text):
    (passed if is_true else failed).append(name)
    if not is_true:
        print("FAIL %s: %s" % (name, text))


def with_programs(name, code, words, options=(), **changes):
    with tempfile.TemporaryDirectory() as folder:
        build(folder, **changes)
        expect(name, code, run(folder, *options), *words)


def main():
    expect("no build folder", 2, run(), "usage: kernels/hip/verify BUILD_DIR")
    expect("not a build", 2, run("/nonexistent"), "no /nonexistent/kernels/tools/dsk-check")
    expect("unknown argument", 2, run("--frobnicate"), "--frobnicate")
    expect("two folders", 2, run("a", "b"), "not a and b")
    with tempfile.TemporaryDirectory() as folder:
        build(folder)
        json = os.path.join(folder, "out.json")
        expect("all right", 0, run(folder, "--json", json, "--quick"), "device: Fake MI300, gfx942", "10 passed, 0 failed",
               "60 passed, 0 failed, 0 skipped", "attend scaled 9.5", "verified: everything")
        check("json", os.path.exists(json), "no file")
        check("kind", arguments(folder, "tests/kernels/kernels_gpu") == "hip\n", "kernels_gpu is not pointed at HIP")
        check("ways", all(w in arguments(folder, "kernels/tools/dsk-check") for w in
                          ("--device hip --ordinal 0", "--cases 100", "--vectors", "--no-graphs")),
              arguments(folder, "kernels/tools/dsk-check"))
        check("quick", "--quick" in arguments(folder, "kernels/tools/dsk-bench"), "dsk-bench is not quick")
        expect("another device", 0, run(folder, "--ordinal", "3", "--no-bench"), "they take device 0")
        check("ordinal", "--ordinal 3" in arguments(folder, "kernels/tools/dsk-check"), "dsk-check takes another")
    device = 'echo "device: d"; '
    with_programs("wrong results", 1, ("FAILED", "FAIL case 7", "NOT verified: 2 of the steps"),
               dsk_check=device + 'echo "FAIL case 7: out"; echo "9 passed, 1 failed"; exit 1')
    with_programs("all skipped", 1, ("NOT verified: 1 of",), kernels_gpu_attend='echo "0 passed, 0 failed, 56 skipped"')
    with_programs("no timings", 1, ("NOT verified: 1 of", "exit status 2"), dsk_bench="exit 2")
    with_programs("checks alone", 0, ("verified",), ("--no-bench",), dsk_bench="exit 2")
    with_programs("tests not built", 0, ("kernels_gpu_attend                 not built",), kernels_gpu_attend=None)
    with_programs("no device", 2, ("no AMD GPU", "no ROCm runtime"), dsk_check='echo "no ROCm runtime" >&2; exit 2')
    if os.path.exists("/dev/kfd"):
        skipped.append("no device, the real program")
        print("SKIP no device, the real program: this machine may have one")
    else:
        with tempfile.TemporaryDirectory() as folder:
            build(folder)
            os.remove(os.path.join(folder, "kernels/tools/dsk-check"))
            os.symlink(os.path.abspath(DSK_CHECK), os.path.join(folder, "kernels/tools/dsk-check"))
            expect("no device, the real program", 2, run(folder), "no AMD GPU", "dsk-check:")
    print("%d passed, %d failed, %d skipped" % (len(passed), len(failed), len(skipped)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
