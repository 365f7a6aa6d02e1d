#!/usr/bin/env python3
"""Who may include whom, and a few more rules of the tree that a compiler does not check (DESIGN: folders).

usage: boundaries.py [ROOT]
Checks the tree at ROOT, then proves on made-up trees that each rule finds what it forbids and leaves alone what
it allows. Ends in `N passed, N failed, N skipped`.
"""
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "..", ".."))

# Headers of ours that are included by bare name, through an include path.
BY_NAME = ("tests/support/", "tests/ref64/", "tests/", "proto/", "client/", "kernels/")
GENERATED = (".pb-c.h", ".pb-c.c")


class Tree:
    """The files of a checkout, as git sees them, or simply all of them."""

    def __init__(self, root):
        self.root = root
        self.names = sorted(self._list())
        self.known = set(self.names)
        self.texts = {}

    def _list(self):
        if os.path.exists(os.path.join(self.root, ".git")):
            out = subprocess.run(["git", "-c", "safe.directory=*", "-C", self.root, "ls-files", "-z", "--cached",
                                  "--others", "--exclude-standard"], check=True, capture_output=True).stdout
            return [n for n in out.decode().split("\0") if n and os.path.isfile(os.path.join(self.root, n))]
        names = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = [f for f in folders if f not in ("build", ".git")]
            names += [os.path.relpath(os.path.join(folder, f), self.root) for f in files]
        return names

    def text(self, name):
        if name not in self.texts:
            with open(os.path.join(self.root, name), "rb") as file:
                data = file.read()
            self.texts[name] = None if b"\0" in data[:8192] else data.decode("utf-8", "replace")
        return self.texts[name]

    def sources(self, *folders):
        return [n for n in self.names if n.endswith((".c", ".h")) and n.startswith(folders)]

    def includes(self, name):
        """(line, as written, the file of ours that it names or None)"""
        found = []
        for i, line in enumerate(self.text(name).split("\n"), 1):
            match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if match:
                found.append((i, match[2], self.resolve(name, match[2], match[1] == '"')))
        return found

    def resolve(self, name, written, is_quoted):
        places = [written] + ([os.path.join(os.path.dirname(name), written)] if is_quoted else [])
        for place in places:
            place = os.path.normpath(place)
            if place in self.known:
                return place
        if "/" in written and not is_quoted:
            return None
        tails = [n for n in self.names if n.startswith(BY_NAME) and n.endswith("/" + written)]
        # <check.h> and its kind are the system's, whatever one of ours is called
        if not is_quoted:
            tails = [n for n in tails if os.path.basename(n) in ("dsa.h", "dsk.h", "dsk_format.h", "dsa_status.h",
                                                                 "dsa_fdsock.h", "ref64.h", "test_main.h")]
        return min(tails, key=len) if tails else None


def blank(match):
    return re.sub(r"[^\n]", " ", match[0])


def code_of(text, keep_strings=False):
    """C without comments (and strings), line for line."""
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, lambda m: m[0] if keep_strings and m[0][0] in "\"'" else blank(m), text, flags=re.S)


# ---- the rules: each yields (file, line, what is wrong) -------------------------------------------------


def kernels_include_nothing_of_ours(tree):
    for name in tree.sources("kernels/"):
        allowed = ("kernels/", "tests/ref64/") if name.startswith("kernels/tools/") else ("kernels/",)
        for line, written, target in tree.includes(name):
            if (target and not target.startswith(allowed)) or written.endswith(GENERATED):
                yield name, line, f"kernels include {written}"


def only_the_kernels_public_headers(tree):
    for name in tree.sources("server/", "tests/server/", "tests/e2e/", "tests/client/"):
        for line, written, target in tree.includes(name):
            if target and target.startswith("kernels/") and target not in ("kernels/dsk.h", "kernels/dsk_format.h"):
                yield name, line, f"{written} is private to kernels/"


def client_sees_no_server_and_no_kernels(tree):
    for name in tree.sources("client/"):
        for line, written, target in tree.includes(name):
            if (target or written).startswith(("server/", "kernels/")):
                yield name, line, f"client includes {written}"


CORE_FORBIDDEN = re.compile(r"^(uv|grpc|google|protobuf-c|dsa/v1)(/|\.h)|pb-c\.h$|^(threads|time|pthread|semaphore|sched|poll"
                            r"|sys/(time|socket|epoll|eventfd|timerfd|mman)|unistd)\.h$|dsk\.h$")


CORE_MAY = ("proto/dsa_status.h", "kernels/dsk_format.h")  # constants; no functions


def core_is_pure(tree):
    for name in tree.sources("server/core/"):
        for line, written, target in tree.includes(name):
            if CORE_FORBIDDEN.search(written):
                yield name, line, f"the pure core includes {written}"
            elif target and not target.startswith("server/core/") and target not in CORE_MAY:
                yield name, line, f"the pure core includes {written}"


def only_in(pattern, places):
    def rule(tree):
        for name in tree.sources(""):
            if name.startswith(places):
                continue
            for line, written, _ in tree.includes(name):
                if re.search(pattern, written):
                    yield name, line, f"{written} is not for this file"
    return rule


grpc_only_in_rpc = only_in(r"^grpc/(?!.*\.pb-c\.h$)", ("server/rpc.c", "server/rpc_process.c", "server/rpc_impl.h", "server/rpc_bell.c", "server/wire.c", "client/", "tests/"))
uv_only_on_the_loop = only_in(r"^uv(/|\.h$)", ("server/loop.c", "server/listener.c", "server/fdsock.c", "server/tls_relay.c", "tests/server/",
                                               "tests/bench/"))
openssl_only_at_the_door = only_in(r"^openssl/", ("server/tls.c", "server/tls_relay.c", "server/access.c", "tests/server/"))
protobuf_only_in_services = only_in(r"\.pb-c\.h$|^protobuf-c/", ("server/wire", "server/svc", "server/descriptors.c",
                                                                 "client/", "tests/"))

# Written in two parts, so that this file does not name them itself.
ABROAD = re.compile(r"\.\./" + r"shared\b|(?<![\w.~-])/(?:work|home|Users|root)" + r"/[\w.-]")


def nothing_of_a_developers_machine(tree):
    for name in tree.names:
        text = tree.text(name)
        for i, line in enumerate((text or "").split("\n"), 1):
            match = ABROAD.search(line)
            if match:
                yield name, i, f"names {line[match.start():match.start() + 40].strip()}"


ROW_BYTES = re.compile(r"(?<![\w.])(656|528|264)[uUlL]*(?![\w.])")


def row_bytes_live_in_dsk_format(tree):
    for name in tree.sources("kernels/", "server/", "client/"):
        if name == "kernels/dsk_format.h":
            continue
        for i, line in enumerate(code_of(tree.text(name)).split("\n"), 1):
            match = ROW_BYTES.search(line)
            if match:
                yield name, i, f"{match[1]} is a row's size: take it from kernels/dsk_format.h or the layout"


def guards_match_paths(tree):
    seen = {}
    for name in tree.names:
        if not name.endswith(".h"):
            continue
        text = tree.text(name)
        code = code_of(text).strip()
        words = re.split(r"[/_.]", name.upper())
        match = re.match(r"#\s*ifndef\s+(\w+)\s*\n#\s*define\s+(\w+)", code)
        if not match:
            # A file that is included for its text, several times over, says so in its first comment.
            if not re.match(r"/\*(?:(?!\*/).)*\binclude", text, re.S | re.I):
                yield name, 1, "no include guard, and no word on who includes it"
            continue
        guard = match[1]
        base = re.sub(r"\W", "_", os.path.basename(name).upper())
        rest = guard[:-len(base)].strip("_").split("_") if guard.endswith(base) else None
        if match[2] != guard:
            yield name, 1, f"guard {guard} defines {match[2]}"
        elif rest is None or not all(w in words + ["", "DSA", "DSK"] for w in rest):
            yield name, 1, f"guard {guard} does not match the path"
        elif guard in seen:
            yield name, 1, f"guard {guard} is that of {seen[guard]} too"
        elif not re.search(r"#\s*endif\s*/\* " + guard + r" \*/\s*$", text):
            yield name, 1, f"ends without #endif /* {guard} */"
        seen[guard] = name


def no_sleeping(tree):
    for name in tree.names:
        if not name.startswith(("server/", "client/", "kernels/", "tests/")) or not name.endswith((".c", ".h", ".py")):
            continue
        if name == "tests/boundaries/boundaries.py":
            continue
        text = tree.text(name)
        is_c = not name.endswith(".py")
        code = code_of(text) if is_c else re.sub(r"#[^\n]*", "", text)
        lines = text.split("\n")
        for i, line in enumerate(code.split("\n"), 1):
            around = "\n".join(lines[max(i - 2, 0):i + 1])
            if is_c and re.search(r"(?<!\w)u?sleep\s*\(", line):
                yield name, i, "sleeps; wait for the event itself"
            elif re.search(r"(?<!\w)(clock_)?nanosleep\s*\(|(?<!\w)sleep\s*\(", line) and not re.search(r"/\*|//|# ", around):
                yield name, i, "waits for a time without a comment beside it that says why"


RULES = [kernels_include_nothing_of_ours, only_the_kernels_public_headers, client_sees_no_server_and_no_kernels,
         core_is_pure, grpc_only_in_rpc, uv_only_on_the_loop, openssl_only_at_the_door, protobuf_only_in_services,
         nothing_of_a_developers_machine, row_bytes_live_in_dsk_format, guards_match_paths, no_sleeping]
NAMES = {grpc_only_in_rpc: "grpc_only_in_rpc", uv_only_on_the_loop: "uv_only_on_the_loop",
         openssl_only_at_the_door: "openssl_only_at_the_door", protobuf_only_in_services: "protobuf_only_in_services"}

# ---- trees that break one rule, and trees that do not ------------------------------------------------------

H = "#ifndef {0}\n#define {0}\n#endif /* {0} */\n"
BASE = {
    "kernels/dsk.h": H.format("DSK_H"),
    "kernels/dsk_format.h": H.format("DSK_FORMAT_H"),
    "kernels/dsk_check.h": H.format("DSK_CHECK_H"),
    "server/status.h": H.format("SERVER_STATUS_H"),
    "server/core/err.h": H.format("SERVER_CORE_ERR_H"),
    "proto/dsa_status.h": H.format("DSA_STATUS_H"),
    "client/dsa.h": H.format("DSA_H"),
    "tests/ref64/ref64.h": H.format("REF64_H"),
}
AWAY = "/".join(["..", "shared", "x"])
HOME = "/" + "home/me/x"

# rule, file, text, how many violations
CASES = [
    (kernels_include_nothing_of_ours, "kernels/cpu/a.c", '#include "server/status.h"\n', 1),
    (kernels_include_nothing_of_ours, "kernels/cpu/a.c", '#include "../../proto/dsa_status.h"\n', 1),
    (kernels_include_nothing_of_ours, "kernels/cpu/a.c", '#include "dsa_status.h"\n', 1),
    (kernels_include_nothing_of_ours, "kernels/cpu/a.c", '#  include "ref64.h"\n', 1),
    (kernels_include_nothing_of_ours, "kernels/a.c", '#include "dsa/v1/dsa.pb-c.h"\n', 1),
    (kernels_include_nothing_of_ours, "kernels/tools/a.c", '#include "client/dsa.h"\n', 1),
    (kernels_include_nothing_of_ours, "kernels/tools/a.c", '#include "ref64.h"\n#include "kernels/dsk.h"\n', 0),
    (kernels_include_nothing_of_ours, "kernels/cpu/a.c", '#include "dsk.h"\n#include <stdio.h>\n', 0),
    (only_the_kernels_public_headers, "server/a.c", '#include "kernels/dsk_check.h"\n', 1),
    (only_the_kernels_public_headers, "server/a.c", '#include "kernels/dsk.h"\n', 0),
    (client_sees_no_server_and_no_kernels, "client/lib/a.c", '#include "server/status.h"\n', 1),
    (client_sees_no_server_and_no_kernels, "client/lib/a.c", '#include "dsk_format.h"\n', 1),
    (client_sees_no_server_and_no_kernels, "client/dsactl/a.c", '#include "../../kernels/dsk.h"\n', 1),
    (client_sees_no_server_and_no_kernels, "client/lib/a.c", '#include "kernels/gone.h"\n', 1),
    (client_sees_no_server_and_no_kernels, "client/lib/a.c", '#include "dsa.h"\n#include "dsa_status.h"\n', 0),
    (core_is_pure, "server/core/a.c", "#include <uv.h>\n", 1),
    (core_is_pure, "server/core/a.c", "#include <grpc/grpc.h>\n", 1),
    (core_is_pure, "server/core/a.c", '#include "dsa/v1/dsa.pb-c.h"\n', 1),
    (core_is_pure, "server/core/a.c", "#include <pthread.h>\n#include <time.h>\n#include <sys/time.h>\n", 3),
    (core_is_pure, "server/core/a.h", '#include "kernels/dsk.h"\n' + H.format("SERVER_CORE_A_H"), 1),
    (core_is_pure, "server/core/a.c", '#include "server/status.h"\n', 1),
    (core_is_pure, "server/core/a.c", '#include "../status.h"\n', 1),
    (core_is_pure, "server/core/a.c", '#include "server/core/err.h"\n#include "dsa_status.h"\n#include <stdatomic.h>\n', 0),
    (grpc_only_in_rpc, "server/svc.c", "#include <grpc/grpc.h>\n", 1),
    (grpc_only_in_rpc, "server/rpc.h", "#include <grpc/grpc.h>\n", 1),
    (grpc_only_in_rpc, "kernels/a.c", "#include <grpc/slice.h>\n", 1),
    (grpc_only_in_rpc, "server/rpc.c", "#include <grpc/grpc.h>\n", 0),
    (grpc_only_in_rpc, "client/lib/a.c", "#include <grpc/grpc.h>\n", 0),
    (uv_only_on_the_loop, "server/loop.h", "#include <uv.h>\n", 1),
    (uv_only_on_the_loop, "client/lib/a.c", '#include "uv.h"\n', 1),
    (uv_only_on_the_loop, "server/fdsock.c", "#include <uv.h>\n", 0),
    (openssl_only_at_the_door, "server/tls.h", "#include <openssl/ssl.h>\n" + H.format("SERVER_TLS_H"), 1),
    (openssl_only_at_the_door, "client/lib/a.c", "#include <openssl/ssl.h>\n", 1),
    (openssl_only_at_the_door, "server/tls.c", "#include <openssl/ssl.h>\n", 0),
    (protobuf_only_in_services, "server/rpc.c", '#include "dsa/v1/dsa.pb-c.h"\n', 1),
    (protobuf_only_in_services, "server/worker.c", "#include <protobuf-c/protobuf-c.h>\n", 1),
    (protobuf_only_in_services, "server/svc_rows.c", '#include "dsa/v1/dsa.pb-c.h"\n', 0),
    (nothing_of_a_developers_machine, "docs/a.md", f"see {AWAY}\n", 1),
    (nothing_of_a_developers_machine, "a.cmake", f"set(x {HOME})\n", 1),
    (nothing_of_a_developers_machine, "a.md", "a/work/b, /usr/include, https://x.org/home/y\n", 0),
    (row_bytes_live_in_dsk_format, "server/a.c", "int n = 656 * 64;\n", 1),
    (row_bytes_live_in_dsk_format, "client/lib/a.c", "x[528u] = y;\n", 1),
    (row_bytes_live_in_dsk_format, "kernels/cpu/a.c", "p += 264;\n", 1),
    (row_bytes_live_in_dsk_format, "server/a.c", '/* 656 */ char *s = "656"; // 528\nint a6 = 0x656, b = 1656;\n', 0),
    (row_bytes_live_in_dsk_format, "tests/a.c", "int n = 656;\n", 0),
    (guards_match_paths, "server/a.h", H.format("SERVER_B_H"), 1),
    (guards_match_paths, "server/a.h", H.format("OTHER_A_H"), 1),
    (guards_match_paths, "server/a.h", "int f(void);\n", 1),
    (guards_match_paths, "server/a.h", "#ifndef SERVER_A_H\n#define SERVER_A\n#endif /* SERVER_A_H */\n", 1),
    (guards_match_paths, "server/a.h", "#ifndef SERVER_A_H\n#define SERVER_A_H\n#endif\n", 1),
    (guards_match_paths, "server/dsa.h", H.format("DSA_H"), 1),
    (guards_match_paths, "server/core/a.h", "/* a.h - b */\n" + H.format("SERVER_CORE_A_H"), 0),
    (guards_match_paths, "kernels/cpu/a.h", "/* Included by b.c for each type. */\nint f(void);\n", 0),
    (no_sleeping, "tests/server/a.c", "int f(void) { sleep(1); }\n", 1),
    (no_sleeping, "server/a.c", "usleep (10); /* why */\n", 1),
    (no_sleeping, "client/a.c", "nanosleep(&t, NULL);\n", 1),
    (no_sleeping, "tests/e2e/a.py", "time.sleep(1)\n", 1),
    (no_sleeping, "tests/e2e/a.py", "# the beat of a heart\ntime.sleep(1)\n", 0),
    (no_sleeping, "client/a.c", "nanosleep(&t, NULL); /* the pace of the trace */\n", 0),
    (no_sleeping, "server/a.c", '/* sleep() */ int sleep_until(int x); char *s = "sleep(1)";\n', 0),
]


def plant(files):
    root = tempfile.mkdtemp(prefix="dsad-boundaries-")
    for name, text in files.items():
        os.makedirs(os.path.dirname(os.path.join(root, name)), exist_ok=True)
        with open(os.path.join(root, name), "w") as file:
            file.write(text)
    return root


def uproot(root):
    for folder, folders, files in os.walk(root, topdown=False):
        for name in files:
            os.remove(os.path.join(folder, name))
        os.rmdir(folder)


def prove(rule, name, text, n_expected):
    root = plant({**BASE, name: text})
    try:
        found = list(rule(Tree(root)))
    finally:
        uproot(root)
    if len(found) == n_expected and all(f[0] == name for f in found):
        return True
    print(f"FAIL self-test {NAMES.get(rule, rule.__name__)}: {name!r} with {text!r}: expected {n_expected}, found {found}")
    return False


def main():
    n_passed = n_failed = 0
    tree = Tree(ROOT)
    if not tree.sources("server/core/") or not tree.sources("kernels/"):
        print(f"FAIL: {ROOT} is not the project's tree")
        n_failed += 1
    for rule in RULES:
        found = list(rule(tree))
        for name, line, what in found:
            print(f"FAIL {NAMES.get(rule, rule.__name__)}: {name}:{line}: {what}")
        n_passed += not found
        n_failed += bool(found)
    for case in CASES:
        is_ok = prove(*case)
        n_passed += is_ok
        n_failed += not is_ok
    for rule in RULES:
        if not any(case[0] is rule and case[3] > 0 for case in CASES):
            print(f"FAIL: no tree shows that {NAMES.get(rule, rule.__name__)} finds anything")
            n_failed += 1
    print(f"{n_passed} passed, {n_failed} failed, 0 skipped")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
