#!/usr/bin/env python3
"""The manifests under deploy/kustomize: they build, fit the schemas of Kubernetes, keep to the restricted Pod Security
Standard, refer to nothing that is not there, and set nothing that dsad does not know.

usage: test_manifests.py [--dsad PATH] [--dsactl PATH]
"""
import argparse
import copy
import glob
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter

import kit
from kit import Skip, build, containers, folders, read, run, settings, templates, tool

OVERLAYS = ["overlays/cpu", "overlays/nvidia-dra", "overlays/nvidia-deviceplugin", "overlays/amd-dra", "overlays/amd-deviceplugin"]
SCHEMAS = "1.34.0"  # the first Kubernetes with resource.k8s.io/v1
arguments = None


def check_restricted(template):
    """What the restricted Pod Security Standard forbids in a pod, and a read-only root file system: a list of faults."""
    faults = []
    spec = template["spec"]
    pod = spec.get("securityContext", {})
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            faults.append(key)
    for volume in spec.get("volumes", []):
        kind = next(key for key in volume if key != "name")
        if kind not in ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"):
            faults.append(f"volume of kind {kind}")
    if pod.get("sysctls"):
        faults.append("sysctls")
    for container in containers(template):
        own = container.get("securityContext", {})
        name = container["name"]
        if (own.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
            faults.append(f"{name}: seccompProfile")
        if not own.get("runAsNonRoot", pod.get("runAsNonRoot")) or own.get("runAsUser", pod.get("runAsUser")) == 0:
            faults.append(f"{name}: may run as root")
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            faults.append(f"{name}: privileges")
        capabilities = own.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
            faults.append(f"{name}: capabilities")
        if own.get("readOnlyRootFilesystem") is not True:
            faults.append(f"{name}: root file system may be written")
        if any("hostPort" in port for port in container.get("ports", [])):
            faults.append(f"{name}: hostPort")
        for path in ("readinessProbe", "livenessProbe", "startupProbe"):
            if (container.get(path, {}).get("httpGet") or {}).get("host"):
                faults.append(f"{name}: {path} asks another host")
    return faults


def all_templates():
    for folder in folders():
        for item, template in templates(build(folder)):
            yield f"{folder} {item['kind']}/{item['metadata']['name']}", template


def sidecar(folder):
    (_, template), = [t for t in templates(build(folder))]
    (container,) = [c for c in template["spec"]["initContainers"] if c["name"] == "dsad"]
    return template["spec"], container


def yaml_is_clean():
    result = run(tool("yamllint"), "--strict", "-c", os.path.join(kit.HERE, "yamllint.yaml"),
                 os.path.join(kit.ROOT, "deploy"), kit.HERE)
    assert result.returncode == 0, result.stdout


def every_folder_builds():
    kit.kustomize()
    assert set(OVERLAYS) < set(folders()), folders()
    for folder in folders():
        assert build(folder), folder


def every_file_is_used():
    named = set()
    for path in glob.glob(os.path.join(kit.KUSTOMIZE, "**", "kustomization.yaml"), recursive=True):
        with open(path, encoding="utf-8") as file:
            named |= {os.path.normpath(os.path.join(os.path.dirname(path), word)) for word in re.findall(r"[\w./-]+", file.read())}
        named.add(path)
    for path in glob.glob(os.path.join(kit.KUSTOMIZE, "**", "*.*"), recursive=True):
        if path.endswith((".yaml", ".env", ".json")):
            assert os.path.normpath(path) in named, f"{path} belongs to no kustomization"


def objects_fit_the_schemas():
    validate = tool("kubernetes-validate")
    n_pods = 0
    with tempfile.TemporaryDirectory() as work:
        paths = []
        for folder in folders():
            objects = build(folder)
            # A kind whose schema is not Kubernetes' own still makes pods: those are checked as such.
            for item, template in templates(objects):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": item["metadata"]["name"], **template.get("metadata", {})},
                       "spec": template["spec"]}
                objects = [*objects, pod]
                n_pods += 1
            paths.append(os.path.join(work, folder.replace("/", "-") + ".yaml"))
            with open(paths[-1], "w", encoding="utf-8") as file:
                kit.yaml.safe_dump_all(objects, file)
        result = run(validate, "--strict", "-k", SCHEMAS, *paths)
        assert result.returncode == 0, "\n".join(line for line in result.stdout.splitlines() if not line.startswith("INFO"))
        unknown = set(re.findall(r"schema for kind (\w+)", result.stdout))
        assert unknown <= {"PodMonitor", "PrometheusRule", "LeaderWorkerSet", "HTTPRoute", "BackendTrafficPolicy"}, unknown
        assert n_pods >= 8, n_pods
        # It finds what is wrong: a misspelled field of a claim.
        text = open(paths[folders().index("overlays/nvidia-dra")], encoding="utf-8").read()
        with open(paths[0], "w", encoding="utf-8") as file:
            file.write(text.replace("deviceClassName", "deviceClass"))
        assert run(validate, "--strict", "-k", SCHEMAS, paths[0]).returncode != 0, "a misspelled field passed"


def pods_are_restricted():
    n = 0
    for name, template in all_templates():
        faults = check_restricted(template)
        assert not faults, f"{name}: {', '.join(faults)}"
        n += 1
    assert n >= 8, n


def what_is_not_restricted_is_found():
    _, good = next(templates(build("overlays/cpu")))

    def damaged(change):
        bad = copy.deepcopy(good)
        change(bad["spec"], containers(bad)[0]["securityContext"])
        return check_restricted(bad)
    assert not damaged(lambda spec, own: None)
    assert damaged(lambda spec, own: spec.update(hostIPC=True))
    assert damaged(lambda spec, own: spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}}))
    assert damaged(lambda spec, own: spec["securityContext"].pop("seccompProfile"))
    assert damaged(lambda spec, own: own.update(runAsUser=0))
    assert damaged(lambda spec, own: own.update(allowPrivilegeEscalation=True))
    assert damaged(lambda spec, own: own.pop("capabilities"))
    assert damaged(lambda spec, own: own.update(capabilities={"drop": ["ALL"], "add": ["IPC_LOCK"]}))
    assert damaged(lambda spec, own: own.pop("readOnlyRootFilesystem"))
    assert damaged(lambda spec, own: containers({"spec": spec})[0]["ports"][0].update(hostPort=1))


def namespace_enforces_it():
    for folder in folders():
        if folder != "monitoring":
            (namespace,) = [o for o in build(folder) if o["kind"] == "Namespace"]
            assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted", folder


def dsad_is_a_native_sidecar():
    for folder in [*OVERLAYS, "examples/leaderworkerset"]:
        spec, dsad = sidecar(folder)
        assert dsad["restartPolicy"] == "Always", folder
        ports = {p["name"]: p["containerPort"] for p in dsad["ports"]}
        for probe, path in (("startupProbe", "/startupz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
            get = dsad[probe]["httpGet"]
            assert get["path"] == path and ports[get["port"]] == 9464, f"{folder}: {probe}"
            # One second, the default, ends in restarts under load.
            assert dsad[probe]["timeoutSeconds"] >= 5, f"{folder}: {probe}"
        # kubelet runs a sidecar's preStop hook while the main container still calls it.
        assert "lifecycle" not in dsad, folder
        (main,) = spec["containers"]
        mounts = {m["name"]: m["mountPath"] for m in dsad["volumeMounts"]}
        assert mounts == {"sockets": "/run/dsad", "shared-memory": "/dev/shm"}, folder
        assert mounts.items() <= {m["name"]: m["mountPath"] for m in main["volumeMounts"]}.items(), folder
        volumes = {v["name"]: v["emptyDir"] for v in spec["volumes"]}
        assert volumes["shared-memory"]["medium"] == "Memory" and volumes["shared-memory"]["sizeLimit"], folder
        for container in (dsad, main):
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), folder
            assert "memory" in container["resources"]["limits"], folder


def probes_and_settings_name_the_same_ports():
    for folder in folders():
        for values in settings(build(folder)).values():
            assert values["DSAD_HTTP"] == "0.0.0.0:9464" and values["DSAD_HEALTH"] == "0.0.0.0:9465", folder
            assert values["DSAD_LISTEN"] == "unix:/run/dsad/dsad.sock", folder


def grace_time_is_enough():
    """30 s for the scheduler, where there is one, then dsad's own."""
    for folder in [f for f in folders() if f != "monitoring"]:
        for values in settings(build(folder)).values():
            drain = int(re.fullmatch(r"(\d+)s", values["DSAD_DRAIN_GRACE"])[1])
        for item, template in templates(build(folder)):
            names = [c["name"] for c in containers(template)]
            if "dsad" in names:
                scheduler = 30 if "scheduler" in names else 0
                assert template["spec"]["terminationGracePeriodSeconds"] >= scheduler + drain + 5, (folder, item["kind"])


def one_claim_serves_both_containers():
    for folder in ("overlays/nvidia-dra", "overlays/amd-dra", "examples/leaderworkerset"):
        spec, _ = sidecar(folder)
        (claim,) = spec["resourceClaims"]
        for container in [*spec["initContainers"], *spec["containers"]]:
            assert container["resources"]["claims"] == [{"name": claim["name"]}], (folder, container["name"])
        (template,) = [o for o in build(folder) if o["kind"] == "ResourceClaimTemplate"]
        assert template["metadata"]["name"] == claim["resourceClaimTemplateName"], folder
        assert template["apiVersion"] == "resource.k8s.io/v1", folder


def device_plugin_gives_gpus_to_one_container():
    for folder in ("overlays/nvidia-deviceplugin", "overlays/amd-deviceplugin"):
        spec, _ = sidecar(folder)
        holders = [c["name"] for c in [*spec["initContainers"], *spec["containers"]]
                   if any(key.endswith("/gpu") for key in c["resources"]["limits"])]
        assert len(holders) == 1, (folder, holders)


def leaderworkerset_has_the_sidecar_of_the_overlay():
    (our_pod, ours), (their_pod, theirs) = sidecar("examples/leaderworkerset"), sidecar("overlays/nvidia-dra")
    differing = [key for key in set(ours) | set(theirs) if ours.get(key) != theirs.get(key)]
    assert set(differing) <= {"envFrom"}, f"the containers differ in {', '.join(differing)}"
    for key in ("securityContext", "volumes", "terminationGracePeriodSeconds", "resourceClaims", "tolerations"):
        assert our_pod[key] == their_pod[key], f"the pods differ in {key}"


def a_folder_of_ones_own_builds():
    """The example of deploy/README.md, on top of this checkout."""
    text = re.search(r"```yaml\n(namespace: dsad\nresources:.*?)```", read("deploy", "README.md"), re.S)[1]
    patch = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "inference"}, "spec": {"template": {"spec": {
        "containers": [{"name": "scheduler", "image": "registry.example.com/model:1", "command": ["/bin/model"], "args": None}]}}}}
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(kit.KUSTOMIZE, os.path.join(work, "kustomize"))
        mine = os.path.join(work, "mine")
        os.mkdir(mine)
        with open(os.path.join(mine, "kustomization.yaml"), "w", encoding="utf-8") as file:
            file.write(re.sub(r"https://\S+", "../kustomize/overlays/nvidia-dra", text))
        with open(os.path.join(mine, "scheduler.yaml"), "w", encoding="utf-8") as file:
            kit.yaml.safe_dump(patch, file)
        result = run(*kit.kustomize(), mine)
        assert result.returncode == 0, result.stdout
    objects = list(kit.yaml.safe_load_all(result.stdout))
    (_, template), = templates(objects)
    dsad, scheduler = containers(template)
    assert dsad["image"].startswith("registry.example.com/dsad:"), dsad["image"]
    assert scheduler["command"] == ["/bin/model"] and "args" not in scheduler and scheduler["volumeMounts"], scheduler
    (values,) = settings(objects).values()
    assert values["DSAD_LAYERS"] == "61" and values["DSAD_DEVICE"] == "cuda", values
    assert not check_restricted(template)


def references_exist():
    for folder in folders():
        objects = build(folder)
        named = {(o["kind"], o["metadata"]["name"]) for o in objects}
        for item, template in templates(objects):
            where = f"{folder} {item['kind']}"
            for container in containers(template):
                for source in container.get("envFrom", []):
                    assert ("ConfigMap", source["configMapRef"]["name"]) in named, f"{where}: {source}"
                mounts = {m["name"] for m in container.get("volumeMounts", [])}
                assert mounts <= {v["name"] for v in template["spec"].get("volumes", [])}, where
            for volume in template["spec"].get("volumes", []):
                if "configMap" in volume:
                    assert ("ConfigMap", volume["configMap"]["name"]) in named, f"{where}: {volume}"
            account = template["spec"].get("serviceAccountName")
            assert account is None or ("ServiceAccount", account) in named, f"{where}: {account}"


def selectors_find_pods():
    for folder in [f for f in folders() if f != "monitoring"]:
        objects = build(folder)
        pods = []
        for _, template in templates(objects):
            labels = dict(template["metadata"]["labels"])
            # LeaderWorkerSet adds these.
            labels.update({"leaderworkerset.sigs.k8s.io/name": "inference", "leaderworkerset.sigs.k8s.io/worker-index": "0"})
            pods.append((labels, {p["name"] for c in containers(template) for p in c.get("ports", []) if "name" in p},
                         {p["containerPort"] for c in containers(template) for p in c.get("ports", [])}))
        for item in objects:
            spec = item.get("spec", {})
            selector = {"Service": lambda s: s["selector"], "NetworkPolicy": lambda s: s["podSelector"]["matchLabels"],
                        "PodDisruptionBudget": lambda s: s["selector"]["matchLabels"]}.get(item["kind"], lambda s: None)(spec)
            if selector is None:
                continue
            name = f"{folder} {item['kind']}/{item['metadata']['name']}"
            found = [p for p in pods if selector.items() <= p[0].items()]
            assert found, f"{name} selects no pod"
            if item["kind"] == "Service":
                for port in spec["ports"]:
                    assert all(port["targetPort"] in names for _, names, _ in found), f"{name}: {port}"
            if item["kind"] == "NetworkPolicy":
                for rule in spec["ingress"]:
                    for port in rule.get("ports", []):
                        assert any(port["port"] in numbers for _, _, numbers in found), f"{name}: {port}"
        monitor = [o for o in build("monitoring") if o["kind"] == "PodMonitor"][0]["spec"]
        (expression,) = monitor["selector"]["matchExpressions"]
        scraped = [p for p in pods if expression["key"] in p[0]]
        assert scraped and all(monitor["podMetricsEndpoints"][0]["port"] in names for _, names, _ in scraped), folder


def images_are_of_this_version():
    version = re.search(r"project\(dsad VERSION ([\d.]+)", read("CMakeLists.txt"))[1]
    for name, template in all_templates():
        for container in containers(template):
            if container["name"] in ("dsad", "scheduler"):
                assert container["image"] == f"localhost/dsad:{version}", f"{name}: {container['image']}"


def help_of(program):
    path = getattr(arguments, program)
    if not path or not os.access(path, os.X_OK):
        raise Skip(f"no {program} was built")
    return path


def dsad_flags():
    """{flag: its line of help}; Skip for a dsad without the operations' flags."""
    text = subprocess.run([help_of("dsad"), "--help"], capture_output=True, text=True, check=True).stdout
    flags = dict(re.findall(r"^ +--([a-z0-9-]+) +(.*)$", text, re.M))
    assert "listen" in flags, text
    return flags


def set_variables():
    """{flag: {value}} of everything that the manifests set."""
    found = {}
    for folder in folders():
        for values in settings(build(folder)).values():
            for name, value in values.items():
                found.setdefault(name[len("DSAD_"):].lower().replace("_", "-"), set()).add(value)
        for _, template in templates(build(folder)):
            for container in containers(template):
                for variable in container.get("env", []):
                    if variable["name"].startswith("DSAD_"):
                        found.setdefault(variable["name"][len("DSAD_"):].lower().replace("_", "-"), set()).add(variable["value"])
    return found


# Flags of the HTTP side, TLS and logs: a dsad without --http may lack these, and no others.
WITH_HTTP = {"http", "health", "admin", "log-format", "tls-cert", "tls-key", "tls-client-ca", "tls-reload"}


def dsad_knows_every_setting():
    flags = dsad_flags()
    wanted = set_variables()
    assert len(wanted) >= 15, wanted
    missing = sorted(set(wanted) - set(flags))
    if missing and "http" not in flags and set(missing) <= WITH_HTTP:
        raise Skip(f"this dsad has no HTTP side yet; it lacks --{', --'.join(missing)}")
    assert not missing, f"dsad --help does not know --{', --'.join(missing)}"


def dsad_takes_every_setting():
    """dsad's own word on the values, where it has --check-config."""
    flags = dsad_flags()
    text = subprocess.run([help_of("dsad"), "--help"], capture_output=True, text=True, check=True).stdout
    if "--check-config" not in text:
        raise Skip("this dsad has no --check-config")
    devices = re.search(r"cpu[\w, ]*", flags["device"])[0]
    for folder in folders():
        for values in settings(build(folder)).values():
            device = values["DSAD_DEVICE"]
            if device not in devices:
                print(f"SKIP dsad_takes_every_setting {folder}: this dsad has no device {device}")
                continue
            # Certificates lie in a Secret: whether the files are there is another question.
            environment = {name: value for name, value in values.items() if not name.startswith("DSAD_TLS_")}
            result = run(help_of("dsad"), "--check-config", env=environment)
            assert result.returncode == 0, f"{folder}: {result.stdout}"
    result = run(help_of("dsad"), "--check-config", env={"DSAD_LAYOUT": "no_such_layout"})
    assert result.returncode != 0, "--check-config takes anything"


def dsactl_knows_every_command():
    n = 0
    for folder in folders():
        for _, template in templates(build(folder)):
            for container in containers(template):
                # SIGTERM after a hook's `dsactl drain` would be the second request to stop, and cut off what runs.
                assert container["name"] != "dsad" or "lifecycle" not in container, folder
                command = [*container.get("command", []), *container.get("args", [])]
                if command[:1] != ["/usr/bin/dsactl"]:
                    continue
                text = run(help_of("dsactl"), command[1], "--help").stdout
                for flag in [word for word in command[2:] if word.startswith("--")]:
                    assert re.search(rf"^ +{flag}\b", text, re.M), f"{folder}: dsactl {command[1]} has no {flag}"
                n += 1
    assert n >= len(OVERLAYS) + 1, n


def image_is_built_from_what_the_build_needs():
    wanted = re.search(r"deploy/packages (gcc .*?)\n\n", read("deploy", "quickstart"), re.S)[1].replace("\\", " ").split()
    dockerfile = read("deploy", "Dockerfile").replace("\\\n", " ")
    line = next(line for line in dockerfile.splitlines() if "/src/deploy/packages" in line and "RUN" in line)
    assert set(wanted) <= set(line.split()), sorted(set(wanted) - set(line.split()))
    taken = re.findall(r"^!([\w./-]+?)/?$", read(".dockerignore"), re.M)
    used = re.findall(r"^ *add_subdirectory\(([\w/]+)\)", read("CMakeLists.txt"), re.M)
    for folder in [f for f in used if f != "tests"] + ["cmake", "deploy/packages", "deploy/rootfs"]:
        assert folder in taken, f".dockerignore leaves out {folder}"
    for name in re.findall(r"/src/([\w/.-]+)", dockerfile):
        assert os.path.exists(os.path.join(kit.ROOT, name)), name
    user = re.search(r"^USER (\S+)$", dockerfile, re.M)[1]
    assert user == "65532:65532", user


def scripts_are_shell():
    for name in ("image", "rootfs", "check-root", "quickstart", "packages"):
        path = os.path.join(kit.ROOT, "deploy", name)
        assert os.access(path, os.X_OK), name
        result = run("bash", "-n", path)
        assert result.returncode == 0, result.stdout


def sessions_stay_when_pods_change():
    path = os.path.join(kit.KUSTOMIZE, "examples", "pick_pod.py")
    spec = importlib.util.spec_from_file_location("pick_pod", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sessions = [f"session-{i}" for i in range(8000)]
    before = {s: module.pick_pod(s, 8) for s in sessions}
    after = {s: module.pick_pod(s, 9) for s in sessions}
    assert all(after[s] in (before[s], module.pick_pod(s, 9)) for s in sessions)
    moved = [s for s in sessions if before[s] != after[s]]
    assert {after[s] for s in moved} == {"dsad-pool-8.dsad-pool.dsad.svc:9460"}, "a session moved between old pods"
    assert len(sessions) / 9 * 0.8 < len(moved) < len(sessions) / 9 * 1.2, len(moved)
    share = Counter(before.values())
    assert len(share) == 8 and max(share.values()) < 1.2 * len(sessions) / 8, share
    statefulset, = [o for o in build("examples/statefulset") if o["kind"] == "StatefulSet"]
    first = module.pick_pod("x", 1)
    assert first == f"{statefulset['metadata']['name']}-0.{statefulset['spec']['serviceName']}.{statefulset['metadata']['namespace']}.svc:9460"


def envoy_hashes_the_session():
    bootstrap = kit.yaml.safe_load(next(o for o in build("examples/statefulset") if o["kind"] == "ConfigMap" and "envoy.yaml" in o["data"])["data"]["envoy.yaml"])
    listener, = bootstrap["static_resources"]["listeners"]
    cluster, = bootstrap["static_resources"]["clusters"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    header = routes[0]["route"]["hash_policy"][0]["header"]["header_name"]
    assert routes[0]["match"]["headers"][0]["name"] == header == "x-session-id"
    assert routes[0]["route"]["cluster"] == cluster["name"] and routes[0]["route"]["timeout"] == "0s"
    assert "direct_response" in routes[1], "calls without a session would spread"
    assert cluster["lb_policy"] in ("MAGLEV", "RING_HASH") and cluster["type"] == "STRICT_DNS"
    address = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    services = {o["metadata"]["name"]: o for o in build("examples/statefulset") if o["kind"] == "Service"}
    name, namespace = address["address"].split(".")[:2]
    assert services[name]["spec"]["clusterIP"] == "None" and services[name]["metadata"]["namespace"] == namespace
    assert address["port_value"] == services[name]["spec"]["ports"][0]["port"]
    policy, = [o for o in build("examples/leaderworkerset") if o["kind"] == "BackendTrafficPolicy"]
    assert policy["spec"]["loadBalancer"]["consistentHash"]["header"]["name"] == header


TESTS = [yaml_is_clean, every_folder_builds, every_file_is_used, objects_fit_the_schemas, pods_are_restricted,
         what_is_not_restricted_is_found, namespace_enforces_it, dsad_is_a_native_sidecar, probes_and_settings_name_the_same_ports,
         grace_time_is_enough, one_claim_serves_both_containers, device_plugin_gives_gpus_to_one_container,
         leaderworkerset_has_the_sidecar_of_the_overlay, a_folder_of_ones_own_builds, references_exist, selectors_find_pods, images_are_of_this_version,
         dsad_knows_every_setting, dsad_takes_every_setting, dsactl_knows_every_command, image_is_built_from_what_the_build_needs,
         scripts_are_shell, sessions_stay_when_pods_change, envoy_hashes_the_session]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dsad")
    parser.add_argument("--dsactl")
    parser.add_argument("-k", default="", help="only tests whose name has this in it")
    arguments = parser.parse_args()
    kit.main([test for test in TESTS if arguments.k in test.__name__])
