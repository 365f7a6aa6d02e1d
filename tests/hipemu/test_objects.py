#!/usr/bin/env python3
"""The HIP kernels as code objects for gfx942 and gfx950: they compile without a warning, and what the objects say of
themselves is what the design wants: target, waves of 64, no spills and no scratch, LDS within the chip's, every kernel there.

usage: test_objects.py SOURCES_DIR
Needs clang-22, lld-22 and llvm-22; clang-19, where there is one, compiles gfx942 as a second opinion. Ends in
`N passed, N failed, N skipped`.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

CHIPS = {"gfx942": 64 << 10, "gfx950": 160 << 10}  # LDS of a block
FLAGS = ["-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib", "-mcode-object-version=5", "-O3", "-std=c++17",
         "-Wall", "-Wextra", "-Werror"]

passed, failed, skipped = [], [], []


def compile_object(compiler, source, chip, out, *more):
    """None, or what the compiler said."""
    run = subprocess.run([compiler, *FLAGS, "--offload-arch=" + chip, *more, "-o", out, source], capture_output=True, text=True)
    return run.stderr.strip() or "exit status %d" % run.returncode if run.returncode or run.stderr.strip() else None


def notes_of(path):
    """(target, {kernel: {key: value}}) of a code object's metadata."""
    text = subprocess.run(["llvm-readelf-22", "--notes", path], capture_output=True, text=True, check=True).stdout
    target = re.search(r"amdhsa\.target:\s+(\S+)", text)
    kernels = {}
    for part in re.split(r"\n  - \.a", text)[1:]:  # .agpr_count or .args begins a kernel
        values = dict(re.findall(r"^\s{4}\.(\w+):\s+(\S+)$", part, re.M))
        if "name" in values:
            kernels[values["name"]] = values
    return target.group(1) if target else "none", kernels


def faults_of(path, chip, names):
    """Everything about the object that is not as it must be."""
    target, kernels = notes_of(path)
    faults = []
    if not target.endswith("--" + chip):
        faults.append("target is %s" % target)
    if set(kernels) != names:
        faults.append("kernels differ: missing %s, unknown %s" % (sorted(names - set(kernels)), sorted(set(kernels) - names)))
    for name, values in sorted(kernels.items()):
        for key, want in (("wavefront_size", 64), ("sgpr_spill_count", 0), ("vgpr_spill_count", 0),
                          ("private_segment_fixed_size", 0)):
            if int(values.get(key, -1)) != want:
                faults.append("%s: %s is %s, not %d" % (name, key, values.get(key), want))
        if int(values["group_segment_fixed_size"]) > CHIPS[chip]:
            faults.append("%s: %s bytes of LDS, the chip has %d" % (name, values["group_segment_fixed_size"], CHIPS[chip]))
    return faults


def kernels_in(source):
    """Names that the source gives its kernels, those that macros make included."""
    text = open(source, encoding="utf-8").read()
    names = set()
    for name in re.findall(r"^\s*KERNEL\(\w+, \w+, (\w+(?:##\w+)*),", text, re.M):
        if "##" not in name:
            names.add(name)
    for macro, template in re.findall(r"#define (\w+_KERNEL)\([\w, ]+\)[\s\\]+KERNEL\(\w+, \w+, ([\w#]+),", text):
        for arguments in re.findall(r"^%s\(([\w, ]+)\)" % macro, text, re.M):
            name = template
            parameters = re.search(r"#define %s\(([\w, ]+)\)" % macro, text).group(1).split(", ")
            for parameter, argument in zip(parameters, arguments.split(", ")):
                name = re.sub(r"##%s\b" % parameter, argument, name)
            names.add(name.replace("##", ""))
    return names


def check(what, faults):
    if faults:
        failed.append(what)
        print("FAIL %s: %s" % (what, "; ".join(faults)))
    else:
        passed.append(what)


BROKEN = {  # kernels that must be found out: (source, what the fault says)
    "too much LDS": ('extern "C" __attribute__((global)) void k(int *p) { static __attribute__((shared)) int a[17000]; '
                     "a[p[0]] = p[1]; __builtin_amdgcn_s_barrier(); p[2] = a[p[3]]; }", "local memory"),
    "scratch": ('extern "C" __attribute__((global)) void k(int *p) { volatile int a[64]; for (int i = 0; i < 64; i++) '
                "a[i] = p[i]; p[0] = a[p[1] & 63]; }", "private_segment_fixed_size"),
    "another name": ('extern "C" __attribute__((global)) void other(int *p) { p[0] = 1; }', "kernels differ"),
}


def main(folder):
    sources = sorted(f for f in os.listdir(folder) if f.endswith(".hip"))
    tools = ["clang-22", "ld.lld-22", "llvm-readelf-22"]
    missing = [t for t in tools if not shutil.which(t)]
    if missing:
        for chip in CHIPS:
            for source in sources:
                skipped.append(source)
                print("SKIP objects_%s_%s: %s not installed" % (source, chip, ", ".join(missing)))
    with tempfile.TemporaryDirectory() as out:
        for chip in CHIPS if not missing else ():
            for source in sources:
                path = os.path.join(out, "%s.%s" % (source, chip))
                said = compile_object("clang-22", os.path.join(folder, source), chip, path, "--no-gpu-bundle-output")
                check("clang-22 %s %s" % (source, chip),
                      [said] if said else faults_of(path, chip, kernels_in(os.path.join(folder, source))))
            for what, (text, fault) in BROKEN.items():
                source, path = os.path.join(out, "broken.hip"), os.path.join(out, "broken.o")
                with open(source, "w", encoding="utf-8") as f:
                    f.write(text)
                if what == "too much LDS" and chip != "gfx942":
                    continue  # within gfx950's
                said = compile_object("clang-22", source, chip, path, "--no-gpu-bundle-output")
                found = [said] if said else faults_of(path, chip, {"k"})
                check("%s is found out %s" % (what, chip), [] if any(fault in f for f in found) else ["not found: %s" % found])
        for source in sources:
            if not shutil.which("clang-19"):
                skipped.append(source)
                print("SKIP second_compiler_%s: clang-19 not installed" % source)
                continue
            said = compile_object("clang-19", os.path.join(folder, source), "gfx942", os.path.join(out, "second.s"), "-S")
            check("clang-19 %s gfx942" % source, [said] if said else [])
    print("%d passed, %d failed, %d skipped" % (len(passed), len(failed), len(skipped)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
