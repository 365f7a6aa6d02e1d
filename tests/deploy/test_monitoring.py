#!/usr/bin/env python3
"""The alerts, the dashboard and the runbook: the rules hold in promtool's tests, every query uses metrics that dsad has, and
each alert has its part of the runbook."""
import json
import os
import re
import shutil
import tempfile

import kit
import metrics
from kit import read, run, tool

RULES = ("deploy", "kustomize", "monitoring", "prometheusrule.yaml")
DASHBOARD = ("deploy", "kustomize", "monitoring", "dashboard.json")


def groups():
    return kit.yaml.safe_load(read(*RULES))["spec"]["groups"]


def rules(kind):
    return [rule for group in groups() for rule in group["rules"] if kind in rule]


def recorded():
    return {rule["record"] for rule in rules("record")}


def promtool_test(changed_groups):
    """promtool's answer to tests/deploy/rules_test.yaml on these groups."""
    with tempfile.TemporaryDirectory() as work:
        with open(os.path.join(work, "rules.yaml"), "w", encoding="utf-8") as file:
            kit.yaml.safe_dump({"groups": changed_groups}, file)
        shutil.copy(os.path.join(kit.HERE, "rules_test.yaml"), work)
        return run(tool("promtool"), "test", "rules", os.path.join(work, "rules_test.yaml"))


def rules_are_well_formed():
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "rules.yaml")
        with open(path, "w", encoding="utf-8") as file:
            kit.yaml.safe_dump({"groups": groups()}, file)
        result = run(tool("promtool"), "check", "rules", path)
        assert result.returncode == 0 and f"{len(rules('expr'))} rules found" in result.stdout, result.stdout


def rules_hold_in_promtools_tests():
    result = promtool_test(groups())
    assert result.returncode == 0, result.stdout


def every_alert_fires_and_is_silent_in_a_test():
    fires, silent = set(), set()
    for scenario in kit.yaml.safe_load(read("tests", "deploy", "rules_test.yaml"))["tests"]:
        for case in scenario["alert_rule_test"]:
            (fires if case.get("exp_alerts") else silent).add(case["alertname"])
    names = {rule["alert"] for rule in rules("alert")}
    assert names == fires == silent, (names ^ fires, names ^ silent)


def a_broken_alert_is_noticed():
    """Alerts that never fire, and alerts that always do: the tests must name every one of them, both times."""
    for expression in ("vector(0) > 1", "vector(1)"):
        changed = groups()
        for group in changed:
            for rule in group["rules"]:
                if "alert" in rule:
                    rule["expr"] = expression
        result = promtool_test(changed)
        named = set(re.findall(r"alertname: (\w+)", result.stdout))
        missed = {rule["alert"] for rule in rules("alert")} - named
        assert result.returncode != 0 and not missed, f"as {expression} these pass: {', '.join(sorted(missed))}"


def alerts_use_metrics_that_exist():
    known = metrics.table()
    for rule in rules("expr"):
        found = metrics.faults(rule["expr"], known, recorded())
        assert not found, f"{rule.get('alert') or rule['record']}: {'; '.join(found)}"


def dashboard_queries():
    """(panel, query) with Grafana's variables replaced"""
    for panel in json.loads(read(*DASHBOARD))["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")


def dashboard_uses_metrics_that_exist():
    known = metrics.table()
    used = set()
    for title, query in dashboard_queries():
        assert "$" not in query, f"{title}: {query}"
        found = metrics.faults(query, known)
        assert not found, f"{title}: {'; '.join(found)}"
        used |= {name for name in known if re.search(rf"\b{name}(_bucket|_sum|_count)?\b", query)}
    unused = set(known) - used - {"up"}
    assert not unused, f"on no panel: {', '.join(sorted(unused))}"


def dashboard_queries_are_promql():
    lines = [{"record": f"panel:{i}", "expr": query} for i, (_, query) in enumerate(dashboard_queries())]
    assert len(lines) >= 30, len(lines)
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "rules.yaml")
        with open(path, "w", encoding="utf-8") as file:
            kit.yaml.safe_dump({"groups": [{"name": "dashboard", "rules": lines}]}, file)
        result = run(tool("promtool"), "check", "rules", path)
        assert result.returncode == 0, result.stdout


def dashboard_fits_on_its_grid():
    dashboard = json.loads(read(*DASHBOARD))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken = {}
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "instance"}, variables


def unknown_metrics_are_found():
    known = metrics.table()
    assert not metrics.faults('sum by (state) (dsad_pool_pages{state="free"}) / 2 > bool 1', known)
    assert not metrics.faults('histogram_quantile(0.9, sum by (le) (rate(dsad_stage_seconds_bucket{stage="queue"}[5m])))', known)
    for wrong in ("dsad_pool_page", 'dsad_pool_pages{shape="free"}', "sum by (shape) (dsad_pool_pages)", "rate(dsad_ready[5m])",
                  "dsad_stage_seconds", 'dsad_stage_seconds_sum{le="1"}', "dsad:never:recorded", "dsad_pool_pages_bucket",
                  "go_goroutines"):
        assert metrics.faults(wrong, known), f"{wrong} passed"


def runbook_has_a_part_for_each_alert():
    text = read("deploy", "runbook.md")
    parts = re.findall(r"^## (Dsad\w+)$", text, re.M)
    names = [rule["alert"] for rule in rules("alert")]
    assert len(parts) == len(set(parts)) and set(parts) == set(names), set(parts) ^ set(names)
    for rule in rules("alert"):
        assert rule["annotations"]["runbook"] == f"deploy/runbook.md#{rule['alert'].lower()}", rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        body = text.split(f"## {rule['alert']}\n")[1].split("\n## ")[0]
        assert len(body.split()) > 20, rule["alert"]
    for name in re.findall(r"\bsee (Dsad\w+)", text):
        assert name in names, name
    for name in set(re.findall(r"`(dsad_[a-z_]+)`", text)):
        assert name in metrics.table(), name


TESTS = [rules_are_well_formed, rules_hold_in_promtools_tests, every_alert_fires_and_is_silent_in_a_test, a_broken_alert_is_noticed,
         alerts_use_metrics_that_exist, dashboard_uses_metrics_that_exist, dashboard_queries_are_promql, dashboard_fits_on_its_grid,
         unknown_metrics_are_found, runbook_has_a_part_for_each_alert]

if __name__ == "__main__":
    kit.main(TESTS)
