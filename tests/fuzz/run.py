#!/usr/bin/python3
"""Runs a fuzzer from its seeds for a fixed number of inputs: run.py PROGRAM [--runs N] [--keep DIR]

The seed of libFuzzer's generator is fixed, so a finding comes again; DSA_TEST_SEED changes it. To look for longer, give --runs 0 (until
stopped) and a folder that keeps what was found."""
import argparse
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))


def wire_seeds():
    from dsabase import np, pb

    def tensor(values):
        codes = {np.dtype(np.uint16): pb.DTYPE_BF16, np.dtype(np.int32): pb.DTYPE_I32, np.dtype(np.float32): pb.DTYPE_F32}
        return pb.Tensor(dtype=codes[values.dtype], shape=values.shape, inline=values.tobytes())

    region = pb.RegionSlice(region_id=b"r" * 16, offset=64)
    q = pb.Tensor(dtype=pb.DTYPE_BF16, shape=[2, 3, 16], strides_bytes=[128, 32, 2], region=region)
    attend = pb.AttendOp(
        segments=[pb.Segment(sequence_id=5, n_rows=2)], q=q, indices=tensor(np.arange(8, dtype=np.int32).reshape(2, 4)),
        lengths=tensor(np.array([1, 4], np.int32)), sink=tensor(np.zeros(3, np.float32)), out=pb.Output(region=region))
    append = pb.AppendOp(sequence_id=1, rows=tensor(np.zeros((2, 8), np.uint16)))
    requests = [
        pb.AttendRequest(session=b"s" * 16, request_id=1, attend=attend), pb.AppendRequest(session=b"s" * 16, append=append)]
    names = ("CreateSequence", "ForkSequence", "TruncateSequence", "ReleaseSequence", "GetSequence", "ImportRows",
             "ExportRows", None, "RegisterRegion", "UnregisterRegion", "GetCapabilities", "GetStats", "Drain")
    requests += [getattr(pb, name + "Request")() if name else pb.SessionRequest() for name in names]
    for request in requests:
        if "session" in request.DESCRIPTOR.fields_by_name and not request.session:
            request.session = b"s" * 16
    yield from (bytes([i]) + request.SerializeToString() for i, request in enumerate(requests))
    yield bytes([0]) + pb.AttendRequest(request_id=2, append=append).SerializeToString()
    yield bytes([0]) + pb.AttendRequest(cancel=pb.CancelOp(target_request_id=3)).SerializeToString()


def config_seeds():
    yield b"layout: scaled_512_0\npool-bytes: 1GiB\nlease: 10s\n# a comment\nsocket-mode: '0600'\nraw-scale: 0.5\n"
    yield b'---\n"listen": "unix:/a b"\nphysical-indices: true\n...\n'
    yield b"layers: &a 3\ncpu-threads: *a\n"
    yield b"a: {b: [c]}\n"
    yield b""


SEEDS = {"fuzz_wire": (wire_seeds, 1000000), "fuzz_config": (config_seeds, 200000)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--keep")
    options = parser.parse_args()
    seeds, runs = SEEDS[os.path.basename(options.program)]
    with tempfile.TemporaryDirectory(prefix="dsa-fuzz-") as work:
        corpus = options.keep or os.path.join(work, "corpus")
        os.makedirs(corpus, exist_ok=True)
        n_seeds = 0
        for n_seeds, seed in enumerate(seeds(), 1):
            with open(os.path.join(corpus, "seed-%d" % n_seeds), "wb") as file:
                file.write(seed)
        runs = runs if options.runs is None else options.runs
        command = [options.program, corpus, "-seed=" + os.environ.get("DSA_TEST_SEED", "1"), "-max_len=4096", "-timeout=20",
                   "-rss_limit_mb=2048", "-print_final_stats=1", "-artifact_prefix=" + work + "/"]
        done = subprocess.run(command + (["-runs=%d" % runs] if runs else []), capture_output=True, text=True, errors="replace")
        told = done.stderr
        stats = dict(line[6:].split(":") for line in told.splitlines() if line.startswith("stat::"))
        n_done = int(stats.get("number_of_executed_units", "0"))
        print("%d seeds, %d inputs, peak memory %s MB" % (n_seeds, n_done, stats.get("peak_rss_mb", "?").strip()))
        if done.returncode == 0 and n_done >= runs:
            print("1 passed, 0 failed, 0 skipped")
            return 0
        print(told[-6000:])
        for name in os.listdir(work):
            if name != "corpus":
                with open(os.path.join(work, name), "rb") as file:
                    print("FAIL %s: %r" % (name, file.read()))
        print("0 passed, 1 failed, 0 skipped")
        return 1


if __name__ == "__main__":
    sys.exit(main())
