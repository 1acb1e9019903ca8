"""Codex, Claude Code, OpenCode and Qwen Code against the scripted server. Each must run a test,
read and edit a file, run the test again and say so; then answer in the resumed session.

    coding_agents.py SHARDPACK CLIENT PROGRAM
"""

import json
import pathlib
import sys
import tempfile

from project import DONE, FAILED, PASSED, PROMPT, RUN, Project
from served import THANKS, WELCOME, Served, call, tried


def script(test, read, edit):
    """Thought and two calls side by side, an edit, the test again, the end."""
    return [
        {"when": PROMPT, "text": f"<think>\nThe test says what is wrong.\n</think>\n\n{test}\n{read}"},
        # The results of both calls: in either order the edit comes next.
        {"when": FAILED, "text": edit},
        {"when": "return a - b", "text": edit},
        {"when": "return a + b", "text": test},
        {"when": PASSED, "text": DONE},
        {"when": THANKS, "text": WELCOME},
        {"text": "A title."},
    ]


def replacement(old_key, new_key):
    return {old_key: "return a - b", new_key: "return a + b"}


class Codex:
    tried = ["responses", "parallel calls", "its apply_patch", "a resumed session"]

    def answers(self, file):
        patch = "*** Begin Patch\n*** Update File: calc.py\n@@\n-    return a - b\n+    return a + b\n*** End Patch"
        edit = call("exec_command", cmd=f"apply_patch <<'EOF'\n{patch}\nEOF")
        return script(call("exec_command", cmd=RUN), call("exec_command", cmd="cat calc.py"), edit)

    def configure(self, project, server):
        provider = {"name": "mine", "base_url": server.url, "wire_api": "responses", "env_key": "MY_KEY"}
        lines = ['model = "m"', 'model_provider = "mine"', "[model_providers.mine]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in provider.items()]
        (project.home / ".codex").mkdir()
        (project.home / ".codex/config.toml").write_text("\n".join(lines))
        project.environment["MY_KEY"] = server.key

    def commands(self, program):
        run = [program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return [[*run, PROMPT], [*run, "--json", PROMPT]], [*run, "resume", "--last", THANKS]


class ClaudeCode:
    tried = ["messages", "parallel calls", "text and stream-json", "a resumed session"]

    def answers(self, file):
        edit = call("Edit", file_path=file, **replacement("old_string", "new_string"))
        return script(call("Bash", command=RUN, description="Test"), call("Read", file_path=file), edit)

    def configure(self, project, server):
        project.environment |= {
            "ANTHROPIC_BASE_URL": server.root,
            "ANTHROPIC_AUTH_TOKEN": server.key,
            "ANTHROPIC_MODEL": "m",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "m",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # As root it asks about each call otherwise.
            "IS_SANDBOX": "1",
        }

    def commands(self, program):
        run = [program, "--dangerously-skip-permissions", "--print"]
        parts = ["--output-format", "stream-json", "--verbose"]
        return [[*run, PROMPT], [*run, *parts, PROMPT]], [*run, "--continue", THANKS]


class OpenCode:
    tried = ["chat completions", "parallel calls", "a resumed session"]

    def answers(self, file):
        edit = call("edit", filePath=file, **replacement("oldString", "newString"))
        return script(call("bash", command=RUN, description="Test"), call("read", filePath=file), edit)

    def configure(self, project, server):
        options = {"baseURL": server.url, "apiKey": server.key}
        models = {"m": {"name": "m", "limit": {"context": 200000, "output": 8192}}}
        mine = {"npm": "@ai-sdk/openai-compatible", "name": "mine", "options": options, "models": models}
        (project.work / "opencode.json").write_text(json.dumps({"provider": {"mine": mine}, "model": "mine/m"}))
        project.environment |= {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}

    def commands(self, program):
        return [[program, "run", PROMPT]], [program, "run", "--continue", THANKS]


class QwenCode:
    tried = ["chat completions", "parallel calls", "a resumed session"]

    def answers(self, file):
        edit = call("edit", file_path=file, **replacement("old_string", "new_string"))
        test = call("run_shell_command", command=RUN, is_background=False)
        return script(test, call("read_file", file_path=file), edit)

    def configure(self, project, server):
        project.environment |= {"OPENAI_API_KEY": server.key, "OPENAI_BASE_URL": server.url, "OPENAI_MODEL": "m"}

    def commands(self, program):
        run = [program, "--auth-type", "openai", "--yolo"]
        return [[*run, "--prompt", PROMPT]], [*run, "--continue", "--prompt", THANKS]


CLIENTS = {"Codex": Codex, "Claude Code": ClaudeCode, "OpenCode": OpenCode, "Qwen Code": QwenCode}


def main():
    shardpack, name, program = sys.argv[1:]
    client = CLIENTS[name]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        project = Project(pathlib.Path(folder))
        with Served(shardpack, client.answers(str(project.file))) as server:
            client.configure(project, server)
            version = project.run([program, "--version"]).strip()
            solving, resuming = client.commands(program)
            for command in solving:
                project.solve(command)
            said = project.run(resuming)
            assert WELCOME in said, f"the resumed session: {WELCOME!r} is not in {said!r}"
    tried(name, version, *client.tried)


main()
