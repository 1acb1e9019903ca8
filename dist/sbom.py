"""Writes what a program is made of as a CycloneDX document: packages, versions, licences, hashes.

    cargo metadata --format-version 1 --locked --filter-platform TARGET | sbom.py TARGET FILE

It knows cargo's own account of the program and Cargo.lock; it looks at no source and asks no
network. The same inputs give the same bytes.
"""

import json
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path

PROGRAM = "shardpack"


def checksums(lock: Path) -> dict[tuple[str, str], str]:
    """SHA-256 of every package that the registry delivers, by name and version."""
    packages = tomllib.loads(lock.read_text())["package"]
    return {(it["name"], it["version"]): it["checksum"] for it in packages if "checksum" in it}


def reached(nodes: dict, root: str) -> dict[str, list[str]]:
    """What the program is built from, and by whom each is asked for; no package of tests alone.

    Packages that only run while others are compiled are listed too: they write code.
    """
    found, waiting = {}, [root]
    while waiting:
        package = waiting.pop()
        if package in found:
            continue
        kinds = lambda it: [kind["kind"] for kind in it["dep_kinds"]]
        wanted = [it["pkg"] for it in nodes[package]["deps"] if any(k != "dev" for k in kinds(it))]
        found[package] = sorted(wanted)
        waiting += wanted
    return found


def component(package: dict, sums: dict) -> dict:
    """One package as CycloneDX has it."""
    name, version = package["name"], package["version"]
    ours = package["source"] is None
    reference = f"pkg:cargo/{name}@{version}"
    described = {
        "type": "application" if name == PROGRAM else "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "purl": reference,
    }
    if not ours:
        described["hashes"] = [{"alg": "SHA-256", "content": sums[name, version]}]
    if package["license"]:
        # Cargo still takes a slash for OR.
        expression = package["license"].replace("/", " OR ").replace("  ", " ")
        described["licenses"] = [{"expression": expression}]
    if package.get("repository"):
        described["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return described


def main(target: str, out: str) -> None:
    """Reads the account from standard input and writes the document."""
    metadata = json.load(sys.stdin)
    packages = {it["id"]: it for it in metadata["packages"]}
    nodes = {it["id"]: it for it in metadata["resolve"]["nodes"]}
    root = metadata["resolve"]["root"]
    sums = checksums(Path(metadata["workspace_root"]) / "Cargo.lock")
    found = reached(nodes, root)
    described = {it: component(packages[it], sums) for it in found}
    rustc = subprocess.run(["rustc", "--version"], check=True, capture_output=True, text=True)
    rust = rustc.stdout.split()[1]
    standard = {
        "type": "library",
        "bom-ref": f"rust-std@{rust}",
        "name": "rust-std",
        "version": rust,
        "description": "Rust's standard library, with musl's C library in static programs for Linux",
        "licenses": [{"expression": "MIT OR Apache-2.0"}],
    }
    others = [described[it] for it in found if it != root] + [standard]
    links = [
        {"ref": described[it]["bom-ref"], "dependsOn": [described[to]["bom-ref"] for to in found[it]]}
        for it in found
    ]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": described[root],
            "properties": [{"name": "cargo:target", "value": target}],
        },
        "components": sorted(others, key=lambda it: it["bom-ref"]),
        "dependencies": sorted(links, key=lambda it: it["ref"]),
    }
    content = json.dumps(document, sort_keys=True)
    document["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, content).urn
    Path(out).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


main(*sys.argv[1:])
