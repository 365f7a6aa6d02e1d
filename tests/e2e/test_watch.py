#!/usr/bin/python3
"""test_watch.py - slow ways to go wrong: descriptors that children would inherit, forks, names that pile up."""

from raw import *  # noqa: F403
import http2
import victim


def children(pid):
    found = []
    for task in os.listdir("/proc/%d/task" % pid):
        with open("/proc/%d/task/%s/children" % (pid, task)) as f:
            found += f.read().split()
    return found


@test()
def descriptors_are_closed_on_exec(server, rng):
    """Every kind of descriptor that the server can hold is there; none would survive an exec, and nothing was forked."""
    with server.session() as s:
        s.region(4096)
        s.offer(victim.memfd())
        s.attend(s.create(), random_q(rng, 1, 1), np.full((1, 1), -1, np.int32))
        others = [server.client() for _ in range(3)]
        for other in others:
            other.health()
        seen = 0
        folder = "/proc/%d/fdinfo" % server.process.pid
        for number in os.listdir(folder):
            try:
                with open(os.path.join(folder, number)) as f:
                    flags = int(re.search(r"flags:\s*([0-7]+)", f.read()).group(1), 8)
                target = os.readlink("/proc/%d/fd/%s" % (server.process.pid, number))
            except OSError:
                continue  # closed meanwhile
            if int(number) > 2:
                seen += 1
                truth(flags & os.O_CLOEXEC, "descriptor %s (%s) would survive an exec" % (number, target))
        truth(seen >= 12, "only %d descriptors: the test does not see them" % seen)
        equal(children(server.process.pid), [], "child processes of the server")
        for other in others:
            other.close()


@test(own=True)
def programs_cannot_fork(env, rng):
    """Neither the server nor the client's tool asks the C library for a process, a shell or an exec."""
    if SANITIZED:
        raise Skip("a sanitizer's runtime imports them for itself")
    tool = os.path.join(os.path.dirname(os.path.abspath(env.dsad)), "..", "client", "dsactl")
    starters = {"fork", "vfork", "_Fork", "clone", "clone3", "system", "popen", "posix_spawn", "posix_spawnp"}
    starters |= {"execl", "execlp", "execle", "execv", "execvp", "execve", "execvpe", "fexecve", "daemon"}
    for program in (env.dsad, tool):
        listed = subprocess.run(["nm", "-D", "--undefined-only", program], capture_output=True, text=True)
        truth(listed.returncode == 0 and "malloc" in listed.stdout, "nm %s: %s" % (program, listed.stderr))
        names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()}
        equal(sorted(names & starters), [], "what %s imports to start processes" % os.path.basename(program))


# ---- names that pile up ----

PER_CONNECTION = 900  # requests of up to 64 bytes: below the window that a peer has before it is told of more


def many_calls(server, requests):
    """requests: [(path, message)], each a call of its own; connections of PER_CONNECTION calls. Counts the answers."""
    n_ended = 0
    for begin in range(0, len(requests), PER_CONNECTION):
        part = requests[begin : begin + PER_CONNECTION]
        connection = http2.Connection(server.path)
        for first in range(0, len(part), 100):  # as many at a time as a connection may have
            for path, message in part[first : first + 100]:
                connection.request(path, message)
            connection.wait_for(min(first + 100, len(part)), 20 * SLOW)
        n_ended += connection.n_ended
        connection.close()
    return n_ended


@test()
def names_do_not_pile_up(server, rng):
    """100,000 names, a quarter each of method names, sessions, sequence ids and regions: memory and figures are what they were."""
    s, sequence, region = fixture(server, rng)
    n = full(100000, 4000)

    def requests(kind, begin, end):
        made = []
        for i in range(begin, end):
            unique = struct.pack("<QQ", i, i * 0x9E3779B97F4A7C15 % 2**64)
            if kind == "method":
                made.append(("/%s/No%012d" % (SERVICE, i), b""))
            elif kind == "session":
                made.append(("/%s/GetSequence" % SERVICE, field(1, unique) + b"\x10\x01"))
            elif kind == "sequence":
                made.append(("/%s/GetSequence" % SERVICE, field(1, s.token) + b"\x10" + varint(2**40 + i)))
            else:
                made.append(("/%s/UnregisterRegion" % SERVICE, field(1, s.token) + field(2, unique)))
        return made

    for kind in ("method", "session", "sequence", "region"):
        part, warm = n // 4, n // 20
        equal(many_calls(server, requests(kind, 0, warm)), warm, "answers while warming up: %s" % kind)
        before = server.rss(), len(server.control.stats().SerializeToString()), server.n_fds()
        equal(many_calls(server, requests(kind, warm, part)), part - warm, "answers: %s" % kind)
        now = server.rss(), len(server.control.stats().SerializeToString())
        truth(now[1] < before[1] + 64, "figures take %d bytes, before %d: %s" % (now[1], before[1], kind))
        wait_until(lambda: server.n_fds() <= before[2] + 1, 5 * SLOW, "the connections are closed")
        if not SANITIZED:
            truth(
                now[0] <= before[0] * 1.05 + (4 << 20), "RSS %d, before %d: %s" % (now[0], before[0], kind)
            )
    equal(s.get(sequence).n_tokens, 64, "the sequence among the names")
    s.close()


if __name__ == "__main__":
    main()
