#!/usr/bin/env python3
"""The HIP kernels as code objects for gfx942 and gfx950: they compile without a warning, and what the objects say of
themselves is what the design wants: target, waves of 64, no spills and no scratch, LDS within the chip's, every kernel there.
Of attend's, matrix instructions, stores to LDS and LDS itself are counted: what its geometry says, no more and no less, so where
there is no RoPE tail there is no code for one.

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


LAYOUTS = {"scaled_512_64": (512, 64, "scaled"), "scaled_512_0": (512, 0, "scaled"), "scaled_256_0": (256, 0, "scaled"),
           "bf16_576": (512, 64, "bf16"), "bf16_512": (512, 0, "bf16"), "bf16_256": (256, 0, "bf16"),
           "raw_512_64": (512, 64, "raw")}


def shape_of(chip, kernel):
    """What an attend kernel's code has, by its geometry: (matrix instructions by name, 16-byte stores to LDS, bytes of LDS)."""
    kind, layout, heads = re.fullmatch(r"attend_(fp8_)?(\w+)_h(16|64)", kernel).groups()
    latent, rope, encoding = LAYOUTS[layout]
    heads = int(heads)
    shared = 4 if heads == 16 else 1  # waves that share the dims
    tile = 16 if not kind and (chip, latent, heads) == ("gfx942", 512, 16) else 32
    wave_tokens, subs = tile // 4, tile // 16
    row_lanes = latent * (2 if encoding == "bf16" else 1) // 16
    rows = wave_tokens * row_lanes // 64  # 16 bytes of a row each, of a lane
    parts = subs if shared == 4 else 0
    rest = 4 * tile + 16 + (256 * tile if shared == 4 else 0)  # flags, counter, partial scores
    if kind:
        scores = "v_mfma_f32_16x16x32_fp8_fp8" if chip == "gfx942" else "v_mfma_f32_16x16x128_f8f6f4"
        depth = 32 if chip == "gfx942" else 128
        counts = {"v_mfma_f32_16x16x32_fp8_fp8": latent // shared // 16}
        counts[scores] = counts.get(scores, 0) + subs * (latent // shared // depth + -(-rope // depth))
        return counts, rows + 1 + parts, tile * (latent + rope + 16) + rest
    depth = 16 if chip == "gfx942" else 32
    name = "v_mfma_f32_16x16x%d_bf16" % depth
    score = subs * (latent // 32 // shared + -(-rope // 32 // shared)) * (32 // depth)
    value = latent // shared // 16 * (tile // depth) * 2  # P is the sum of two
    wide = 1 if encoding == "bf16" else 2  # stores of 16 bytes of a row
    tail = 0 if not rope else 2 if encoding == "raw" else 1
    return {name: score + value}, rows * wide + tail + parts, tile * (2 * (latent + rope) + 16) + 16 * tile + rest


def masked_matrices(text):
    """How many matrix instructions stand where lanes may be off: in what is skipped when all are, or right behind a mask.
    TEXT: assembly."""
    lines = [line.strip() for line in text.split("\n")]
    places = {m.group(1): i for i, m in enumerate(re.match(r"(\.LBB\w+):", line) for line in lines) if m}
    found = set()
    for i, line in enumerate(lines):
        skip, mask = re.match(r"s_cbranch_execz (\.LBB\w+)", line), re.match(r"s_\w+_saveexec_b64", line)
        end = places.get(skip.group(1), 0) if skip else i + 1
        while mask and end < len(lines) and not re.match(r"\.LBB|s_c?branch|s_\w+ exec,|s_\w+_saveexec", lines[end]):
            end += 1
        if skip or mask:
            found.update(j for j in range(i + 1, end) if lines[j].startswith("v_mfma"))
    return len(found)


def faults_of_code(chip, kernel, text, lds=None):
    """TEXT: the kernel's instructions, one a line."""
    names = re.findall(r"^\s+([a-z]\w+)", text, re.M)
    faults = ["%s: has %s" % (kernel, n) for n in sorted(set(names)) if re.match(r"flat_|scratch_|buffer_", n)]
    if not re.fullmatch(r"attend_\w+_h\d+", kernel):
        return faults
    counts, stores, lds_wanted = shape_of(chip, kernel)
    found = {n: names.count(n) for n in set(names) if n.startswith("v_mfma")}
    if found != counts:
        faults.append("%s: matrix instructions %s, not %s" % (kernel, found, counts))
    if names.count("ds_write_b128") != stores:
        faults.append("%s: %d stores of 16 bytes to LDS, not %d" % (kernel, names.count("ds_write_b128"), stores))
    if lds is not None and lds != lds_wanted:
        faults.append("%s: %d bytes of LDS, not %d" % (kernel, lds, lds_wanted))
    return faults


def code_of(path):
    """{kernel: its instructions}"""
    text = subprocess.run(["llvm-objdump-22", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^[0-9a-f]+ <(\w+)>:\n(.*?)(?=^[0-9a-f]+ <|\Z)", text, re.M | re.S))


def assembly_of(path):
    """The same of a compiler's assembly."""
    with open(path, encoding="utf-8") as f:
        return dict(re.findall(r"^(\w+):\s*; @\w+\n(.*?)^\.Lfunc_end", f.read(), re.M | re.S))


def faults_of_attend(path, chip):
    kernels, code = notes_of(path)[1], code_of(path)
    faults = []
    for name, values in sorted(kernels.items()):
        if name not in code:
            faults.append("%s: no code found" % name)
            continue
        faults += faults_of_code(chip, name, code[name], int(values["group_segment_fixed_size"]))
    return faults


def faults_of_masks(code):
    return ["%s: %d matrix instructions where lanes may be off" % (name, masked_matrices(text))
            for name, text in sorted(code.items()) if masked_matrices(text)]


def check_that_counts_tell(path, chip):
    """A kernel with a tail passed for one without, and the other way round, must be found out."""
    code = code_of(path)
    for name, other in (("attend_scaled_512_64_h16", "attend_scaled_512_0_h16"), ("attend_bf16_512_h64", "attend_bf16_576_h64")):
        check("%s is told from %s %s" % (name, other, chip),
              [] if len(faults_of_code(chip, other, code[name])) == 2 else ["not told"])


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


MASKED = """
  s_and_saveexec_b64 s[6:7], vcc
  s_cbranch_execz .LBB0_2
; %bb.1:
  v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
.LBB0_2:
  s_or_b64 exec, exec, s[6:7]
  v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
  s_and_saveexec_b64 s[6:7], vcc
  v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
  s_or_b64 exec, exec, s[6:7]
"""

BROKEN = {  # kernels that must be found out: (source, what the fault says)
    "too much LDS": ('extern "C" __attribute__((global)) void k(int *p) { static __attribute__((shared)) int a[17000]; '
                     "a[p[0]] = p[1]; __builtin_amdgcn_s_barrier(); p[2] = a[p[3]]; }", "local memory"),
    "scratch": ('extern "C" __attribute__((global)) void k(int *p) { volatile int a[64]; for (int i = 0; i < 64; i++) '
                "a[i] = p[i]; p[0] = a[p[1] & 63]; }", "private_segment_fixed_size"),
    "another name": ('extern "C" __attribute__((global)) void other(int *p) { p[0] = 1; }', "kernels differ"),
}


def main(folder):
    sources = sorted(f for f in os.listdir(folder) if f.endswith(".hip"))
    tools = ["clang-22", "ld.lld-22", "llvm-objdump-22", "llvm-readelf-22"]
    missing = [t for t in tools if not shutil.which(t)]
    if missing:
        for chip in CHIPS:
            for source in sources:
                skipped.append(source)
                print("SKIP objects_%s_%s: %s not installed" % (source, chip, ", ".join(missing)))
    check("masked matrix instructions are found out", [] if masked_matrices(MASKED) == 2 else ["not found"])
    with tempfile.TemporaryDirectory() as out:
        for chip in CHIPS if not missing else ():
            for source in sources:
                path = os.path.join(out, "%s.%s" % (source, chip))
                said = compile_object("clang-22", os.path.join(folder, source), chip, path, "--no-gpu-bundle-output")
                check("clang-22 %s %s" % (source, chip),
                      [said] if said else faults_of(path, chip, kernels_in(os.path.join(folder, source))))
                if source == "attend.hip" and not said:
                    check("code of %s %s" % (source, chip), faults_of_attend(path, chip))
                    check_that_counts_tell(path, chip)
                    path += ".s"
                    said = compile_object("clang-22", os.path.join(folder, source), chip, path, "-S")
                    check("masks in %s %s" % (source, chip), [said] if said else faults_of_masks(assembly_of(path)))
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
            path = os.path.join(out, "second.s")
            said = compile_object("clang-19", os.path.join(folder, source), "gfx942", path, "-S")
            check("clang-19 %s gfx942" % source, [said] if said else [])
            if source == "attend.hip" and not said:
                code = assembly_of(path)
                check("code of %s gfx942 by clang-19" % source,
                      sum((faults_of_code("gfx942", name, code.get(name, "")) for name in kernels_in(os.path.join(folder, source))),
                          []) + faults_of_masks(code))
    print("%d passed, %d failed, %d skipped" % (len(passed), len(failed), len(skipped)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
