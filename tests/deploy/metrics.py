"""The metrics that alerts, dashboard and runbook may use, and with which labels: those of server/METRICS.md, or, in a checkout
whose server has no such page, the names agreed on for it."""
import os
import re

import kit

# name: (type, its own labels); what every target has besides is added by Prometheus
AGREED = {
    "dsad_build_info": ("gauge", {"version", "commit", "device", "layout"}),
    "dsad_requests_total": ("counter", {"method", "code"}),
    "dsad_queue_requests": ("gauge", set()),
    "dsad_queue_rows": ("gauge", set()),
    "dsad_queue_bytes": ("gauge", set()),
    "dsad_stage_seconds": ("histogram", {"stage"}),
    "dsad_request_seconds": ("histogram", {"method"}),
    "dsad_batch_rows": ("histogram", set()),
    "dsad_rows_total": ("counter", set()),
    "dsad_pool_pages": ("gauge", {"state"}),
    "dsad_sequences": ("gauge", set()),
    "dsad_sessions": ("gauge", set()),
    "dsad_sessions_reclaimed_total": ("counter", set()),
    "dsad_regions": ("gauge", {"kind", "transport", "state"}),
    "dsad_region_bytes": ("gauge", set()),
    "dsad_graph_lookups_total": ("counter", {"result"}),
    "dsad_invalid_indices_total": ("counter", set()),
    "dsad_nonfinite_inputs_total": ("counter", set()),
    "dsad_device_memory_bytes": ("gauge", {"state"}),
    "dsad_device_errors_total": ("counter", {"code"}),
    "dsad_connections": ("gauge", set()),
    "dsad_streams": ("gauge", set()),
    "dsad_refused_total": ("counter", {"reason"}),
    "dsad_ready": ("gauge", set()),
    "dsad_live": ("gauge", set()),
    "dsad_draining": ("gauge", set()),
    "dsad_worker_stuck": ("gauge", set()),
    "dsad_tls_certificate_expiry_timestamp_seconds": ("gauge", set()),
    "dsad_tls_reload_failures_total": ("counter", set()),
    "process_start_time_seconds": ("gauge", set()),
    "process_open_fds": ("gauge", set()),
    "process_max_fds": ("gauge", set()),
    "process_resident_memory_bytes": ("gauge", set()),
    "process_virtual_memory_bytes": ("gauge", set()),
    "process_cpu_seconds_total": ("counter", set()),
}
FROM_PROMETHEUS = {"up": ("gauge", set())}
TARGET_LABELS = {"job", "instance", "namespace", "pod"}


def documented():
    """The table of server/METRICS.md: rows whose first cell is `name` or `name{label,label}`. Types come from the agreed list or
    from the row."""
    path = os.path.join(kit.ROOT, "server", "METRICS.md")
    if not os.path.exists(path):
        return None
    found = {}
    for line in kit.read("server", "METRICS.md").splitlines():
        match = re.match(r"\|\s*`((?:dsad|process)_[a-z0-9_]+)(?:\{([^}]*)\})?`", line)
        if not match:
            continue
        labels = {re.match(r"\s*([a-z_]+)", part)[1] for part in (match[2] or "").split(",") if part.strip()}
        if match[2] is None:  # labels in a cell of their own
            labels = {word for word in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", line[match.end():]) if word in ALL_LABELS}
        kind = re.search(r"\b(counter|gauge|histogram)\b", line)
        known = AGREED.get(match[1], ("gauge", set()))
        found[match[1]] = (kind[1] if kind else known[0], labels or known[1])
    return found


ALL_LABELS = set().union(*(labels for _, labels in AGREED.values()))


def table():
    return {**(documented() or AGREED), **FROM_PROMETHEUS}


def faults(expression, known, recorded=()):
    """What is wrong with the metrics and labels of a PromQL expression: a list."""
    found = []
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    for match in re.finditer(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(\s*\{([^}]*)\})?", bare):
        name, labels = match[1], {part.split("=")[0].split("!")[0].strip() for part in (match[3] or "").split(",") if part.strip()}
        if ":" in name:
            if name not in recorded:
                found.append(f"{name} is recorded by no rule")
            continue
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        if name not in known and known.get(base, ("",))[0] == "histogram":
            own = known[base][1] | ({"le"} if name.endswith("_bucket") else set())
        elif name in known:
            if known[name][0] == "histogram":
                found.append(f"{name} is a histogram")
            own = known[name][1]
        elif re.match(r"(dsad|process|go|container|kube|node)_|up$", name):
            found.append(f"{name} is not a metric of dsad")
            continue
        else:
            continue  # a function, an operator, a label in by ()
        if labels - own - TARGET_LABELS:
            found.append(f"{name} has no label {', '.join(sorted(labels - own - TARGET_LABELS))}")
    possible = TARGET_LABELS | {"le"} | set().union(*(labels for _, labels in known.values()))
    for match in re.finditer(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)", bare):
        for label in [part.strip() for part in match[1].split(",") if part.strip()]:
            if label not in possible:
                found.append(f"no metric has the label {label}")
    for match in re.finditer(r"\b(rate|increase)\(\s*([a-zA-Z_:][\w:]*)", bare):
        kind = known.get(match[2], known.get(re.sub(r"_(bucket|sum|count)$", "", match[2]), ("",)))[0]
        if kind == "gauge":
            found.append(f"{match[1]}() of {match[2]}, which is a gauge")
    return found
