"""Adds up the closing lines of the test programs that ctest ran: sum.py JUNIT.xml COUNTS FAILURES

Prints a line for each program, its skips, and the output of those that failed; writes "passed failed skipped" to COUNTS
and appends what failed, in a line each, to FAILURES. A program that failed, or that closed without its line, counts as
at least one failure."""
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

CLOSING = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?\s*$", re.M)


def skips(output):
    """The tests skipped, by reason: {reason: ["name", "name x3"]}"""
    by_reason = {}
    for name, reason in re.findall(r"^SKIP ([^:]+): (.*)$", output, re.M):
        by_reason.setdefault(reason, Counter())[re.sub("_fn$", "", name)] += 1
    return {reason: [name if n == 1 else "%s x%d" % (name, n) for name, n in names.items()]
            for reason, names in by_reason.items()}


def shown(output, head=100, tail=300):
    """The output, without its middle where it is long."""
    lines = output.strip().splitlines()
    if len(lines) > head + tail:
        lines[head:-tail] = ["[%d lines left out]" % (len(lines) - head - tail)]
    return "\n".join(lines)


def failures(name, output):
    """What failed in a program, a line each."""
    lines = re.findall(r"^FAIL.*$|^.*: (?:FAIL|ERROR): .*$|^.*:\d+:[FE]:.*$", output, re.M)
    return ["%s: %s" % (name, line.strip()[:300]) for line in lines[:10]] or ["%s: no test said that it failed" % name]


def main(junit, counts, failed):
    total = [0, 0, 0]
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    for case in sorted(cases, key=lambda c: c.get("name")):
        output = case.findtext("system-out") or ""
        lines = CLOSING.findall(output)
        has_failed = case.get("status") != "run" or case.find("failure") is not None
        count = [int(n or 0) for n in lines[-1]] if lines else [0, 0, 0]
        what = ""
        if not lines:
            what = " (no closing line)"
        elif has_failed and count[1] == 0:
            what = " (its exit status says that it failed)"
        if (has_failed or not lines) and count[1] == 0:
            count[1] = 1
        print("%-28s %4d passed, %d failed, %d skipped  %6.1f s%s"
              % (case.get("name"), *count, float(case.get("time") or 0), what))
        for reason, names in skips(output).items():
            print("    SKIP %s: %s" % (", ".join(names), reason))
        if count[1] > 0:
            print("---- output of %s\n%s\n----" % (case.get("name"), shown(output)))
            with open(failed, "a") as file:
                file.writelines(line + what + "\n" for line in failures(case.get("name"), output))
        total = [a + b for a, b in zip(total, count)]
    if not cases:
        total[1] += 1
        print("no test program ran")
    with open(counts, "w") as file:
        file.write("%d %d %d\n" % tuple(total))


if __name__ == "__main__":
    main(*sys.argv[1:])
