#!/usr/bin/env python3
"""dsad and GPUs that are not there, or are not what the build has code for: refused at start, by name, nothing left behind.
And a HIP device that is there: a fake HIP runtime whose kernels run in an emulator (tests/hiphost), where DSA_FAKE_HIP
names its folder."""

from dsatest import *  # noqa: F403

FAKE_HIP = os.environ.get("DSA_FAKE_HIP", "")
HAS_ATTEND = os.path.exists(os.path.join(ROOT, "kernels", "hip", "attend.hip"))


def with_fake(devices=1, arch="gfx942:sramecc+:xnack-"):
    if not FAKE_HIP:
        raise Skip("this build has no fake HIP runtime")
    return (
        "env",
        "LD_LIBRARY_PATH=" + FAKE_HIP,
        "FAKE_HIP_DEVICES=%d" % devices,
        "FAKE_HIP_ARCH=" + arch,
        # LeakSanitizer cannot walk the emulator's stacks in a process that ends beside gRPC's threads; hip_host looks for leaks.
        "ASAN_OPTIONS=" + os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0",
    )


def refused(env, words, **options):
    """The exit code of a start that is refused with all of these words."""
    server = Server(env, **options)
    code = server.wait_exit(10 * SLOW)
    for word in words:
        truth(word in server.text(), "%r without %r" % (server.text(), word))
    truth(not os.path.exists(server.path), "no socket is left by a refused start")
    return code


@test(own=True)
def gpus_that_are_not_there(env, rng):
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd"):
        raise Skip("this machine has a GPU")
    codes = [
        refused(env, ("device.kind", reason), device=kind)
        for kind, reason in (("cuda", "no NVIDIA driver"), ("hip", "no ROCm runtime"))
    ]
    truth(codes[0] != 0 and codes[0] == codes[1], "exit codes %r" % codes)


@test(own=True)
def a_runtime_without_devices(env, rng):
    code = refused(env, ("device.kind", "no ROCm-capable device"), wrapper=with_fake(devices=0), device="hip")
    truth(code != 0, "exit code %d" % code)


@test(own=True)
def a_device_that_no_code_is_for(env, rng):
    words = ("device.ordinal", "gfx90a", "gfx942, gfx950")
    code = refused(env, words, wrapper=with_fake(arch="gfx90a:sramecc+:xnack-"), device="hip")
    truth(code != 0, "exit code %d" % code)


@test(own=True)
def a_hip_device_serves(env, rng):
    """Rows go in and come out, and attend agrees with float64; without an attend kernel in the build start-up says so."""
    for arch in ("gfx942", "gfx950"):
        options = {"device": "hip", "pool-pages": "32", "batch-rows": "8", "max-rows": "16", "max-topk": "256"}
        options["wrapper"] = with_fake(arch=arch)
        if not HAS_ATTEND:
            code = refused(env, ("device.layout", "no attend kernel for " + arch), **options)
            truth(code != 0, "exit code %d" % code)
            continue
        server = env.start(**options)
        device = server.capabilities.devices[0]
        equal((device.kind, device.arch, device.name), ("hip", arch, "Fake Instinct 0"), "device")
        server.expect_working()
        server.expect_empty()
        server.stop()


if __name__ == "__main__":
    main()
