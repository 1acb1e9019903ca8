"""Other people's verifier accepts our signatures and refuses what was changed; ours accepts theirs.

    signatures.py SHARDPACK
"""

import pathlib
import subprocess
import sys
import tempfile

data = pathlib.Path(__file__).parent.parent / "data"
shardpack = pathlib.Path(sys.argv[1]).absolute()
OWN = "model-00001-of-00001.safetensors"


def run(*args):
    return subprocess.run([*map(str, args)], capture_output=True, text=True)


def ours(*args):
    done = run(shardpack, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def theirs(package, key):
    signature = package / "model.sig"
    return run(sys.executable, "-m", "model_signing", "verify", "key", package, "--signature", signature, "--public_key", key)


def refused(package, key, *words):
    done = theirs(package, key)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and all(word in said for word in words), (words, done)


def flip(file):
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        package_set, key, public = folder / "set", folder / "signer", folder / "signer.pub"
        ours("convert", data / "kjv-4m", "-o", package_set, "--nodes", 2)
        ours("keygen", "-o", key)
        ours("keygen", "-o", folder / "other")
        ours("sign", package_set, "--key", key)
        for package in (package_set / "node-0", package_set / "node-1"):
            done = theirs(package, public)
            assert done.returncode == 0 and "Verification succeeded" in done.stdout, done
        # What a file manager leaves is not taken for a file that someone has slipped in.
        (package / ".DS_Store").write_text("x")
        assert theirs(package, public).returncode == 0
        refused(package, folder / "other.pub", "Key mismatch")
        flip(package / OWN)
        refused(package, public, "Hash mismatch", OWN)
        flip(package / OWN)
        (package / "config.json").rename(folder / "config.json")
        refused(package, public, "Missing files")
        (folder / "config.json").rename(package / "config.json")
        (package / "notes.txt").write_text("x")
        refused(package, public, "Extra files found")
        (package / "notes.txt").unlink()
        assert theirs(package, public).returncode == 0
        print("interop: model_signing accepts signed packages and refuses changed ones")

        signature = package / "model.sig"
        signature.unlink()
        (package / ".DS_Store").unlink()
        done = run(sys.executable, "-m", "model_signing", "sign", "key", package, "--signature", signature, "--private_key", key)
        assert done.returncode == 0, done
        assert "signed with key" in ours("verify", package, "--key", public)
        flip(package / OWN)
        done = run(shardpack, "verify", package, "--key", public)
        assert done.returncode == 1 and "changed since it was signed" in done.stderr, done
        print("interop: verify --key accepts what model_signing has signed")


main()
