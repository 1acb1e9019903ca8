"""Codex, Claude Code, OpenCode and Qwen Code against the scripted server. Each must run a test,
read and edit a file, run the test again and say so; call a tool of an MCP server; then answer in the
resumed session.

    coding_agents.py SHARDPACK CLIENT PROGRAM
"""

import json
import pathlib
import sys
import tempfile

from project import DONE, FAILED, PASSED, PROMPT, RUN, Project
from served import THANKS, WELCOME, Served, call, equal, tried

MCP_QUESTION, MCP_RESULT, MCP_ANSWER = "Weather in Oslo?", "snow in Oslo", "Oslo is white."


def script(test, read, edit, mcp):
    """Thought and two calls side by side, an edit, the test again, the end; what calls the MCP tool."""
    return [
        *mcp,
        {"when": MCP_RESULT, "text": MCP_ANSWER},
        {"when": PROMPT, "text": f"<think>\nThe test says what is wrong.\n</think>\n\n{test}\n{read}"},
        # The results of both calls: in either order the edit comes next.
        {"when": FAILED, "text": edit},
        {"when": "return a - b", "text": edit},
        {"when": "return a + b", "text": test},
        {"when": PASSED, "text": DONE},
        {"when": THANKS, "text": WELCOME},
        {"text": "A title."},
    ]


def asked(use):
    return [{"when": MCP_QUESTION, "text": use}]


def searched(search, found, use):
    """Where tools of MCP servers are searched for before they are called."""
    return [{"when": MCP_QUESTION, "text": search}, {"when": found, "text": use}]


def entry(project):
    """The MCP server as most clients configure it."""
    command, *arguments = project.mcp
    return {"command": command, "args": arguments}


def replacement(old_key, new_key):
    return {old_key: "return a - b", new_key: "return a + b"}


class Codex:
    tried = ["responses", "parallel calls", "its apply_patch", "text and JSON", "an MCP server", "a resumed session"]

    def answers(self, file):
        patch = "*** Begin Patch\n*** Update File: calc.py\n@@\n-    return a - b\n+    return a + b\n*** End Patch"
        edit = call("exec_command", cmd=f"apply_patch <<'EOF'\n{patch}\nEOF")
        test, read = call("exec_command", cmd=RUN), call("exec_command", cmd="cat calc.py")
        # The model sees a tool within a namespace by its own name, the client by both.
        return script(test, read, edit, asked(call("get_weather", city="Oslo")))

    def configure(self, project, server):
        provider = {"name": "mine", "base_url": server.url, "wire_api": "responses", "env_key": "MY_KEY"}
        lines = ['model = "m"', 'model_provider = "mine"', "[model_providers.mine]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in provider.items()]
        command, *arguments = project.mcp
        lines += ["[mcp_servers.weather]", f"command = {json.dumps(command)}", f"args = {json.dumps(arguments)}"]
        (project.home / ".codex").mkdir()
        (project.home / ".codex/config.toml").write_text("\n".join(lines))
        project.environment["MY_KEY"] = server.key

    def commands(self, program):
        run = [program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return run, ["--json"], ["resume", "--last"]


class ClaudeCode:
    tried = ["messages", "parallel calls", "text and stream-json", "an MCP server", "a resumed session"]

    def answers(self, file):
        edit = call("Edit", file_path=file, **replacement("old_string", "new_string"))
        test, read = call("Bash", command=RUN, description="Test"), call("Read", file_path=file)
        search = call("ToolSearch", query="select:mcp__weather__get_weather", max_results=1)
        use = call("mcp__weather__get_weather", city="Oslo")
        return script(test, read, edit, searched(search, "get_weather can be called now", use))

    def configure(self, project, server):
        (project.work / ".mcp.json").write_text(json.dumps({"mcpServers": {"weather": entry(project)}}))
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
        run = [program, "--dangerously-skip-permissions", "--mcp-config=.mcp.json", "--print"]
        return run, ["--output-format", "stream-json", "--verbose"], ["--continue"]


class OpenCode:
    tried = ["chat completions", "parallel calls", "text and JSON", "an MCP server", "a resumed session"]

    def answers(self, file):
        edit = call("edit", filePath=file, **replacement("oldString", "newString"))
        test, read = call("bash", command=RUN, description="Test"), call("read", filePath=file)
        return script(test, read, edit, asked(call("weather_get_weather", city="Oslo")))

    def configure(self, project, server):
        options = {"baseURL": server.url, "apiKey": server.key}
        models = {"m": {"name": "m", "limit": {"context": 200000, "output": 8192}}}
        mine = {"npm": "@ai-sdk/openai-compatible", "name": "mine", "options": options, "models": models}
        mcp = {"weather": {"type": "local", "command": project.mcp}}
        configuration = {"provider": {"mine": mine}, "model": "mine/m", "mcp": mcp}
        (project.work / "opencode.json").write_text(json.dumps(configuration))
        project.environment |= {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}

    def commands(self, program):
        return [program, "run"], ["--format", "json"], ["--continue"]


class QwenCode:
    tried = ["chat completions", "parallel calls", "text and JSON", "an MCP server", "a resumed session"]

    def answers(self, file):
        edit = call("edit", file_path=file, **replacement("old_string", "new_string"))
        test = call("run_shell_command", command=RUN, is_background=False)
        search = call("tool_search", query="select:mcp__weather__get_weather")
        use = call("tool_call", name="mcp__weather__get_weather", arguments={"city": "Oslo"})
        return script(test, call("read_file", file_path=file), edit, searched(search, "<functions>", use))

    def configure(self, project, server):
        (project.home / ".qwen").mkdir()
        settings = {"mcpServers": {"weather": entry(project)}}
        (project.home / ".qwen/settings.json").write_text(json.dumps(settings))
        project.environment |= {"OPENAI_API_KEY": server.key, "OPENAI_BASE_URL": server.url, "OPENAI_MODEL": "m"}

    def commands(self, program):
        return [program, "--auth-type", "openai", "--yolo"], ["--output-format", "json"], ["--continue"]


CLIENTS = {"Codex": Codex, "Claude Code": ClaudeCode, "OpenCode": OpenCode, "Qwen Code": QwenCode}


def main():
    shardpack, name, program = sys.argv[1:]
    client = CLIENTS[name]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        project = Project(pathlib.Path(folder))
        with Served(shardpack, client.answers(str(project.file))) as server:
            client.configure(project, server)
            version = project.run([program, "--version"]).strip()
            run, whole, resume = client.commands(program)
            project.solve([*run, PROMPT])
            project.solve([*run, *whole, PROMPT])
            said = project.run([*run, MCP_QUESTION])
            equal(project.asked(), ["Oslo"], "what the MCP server was asked")
            assert MCP_ANSWER in said, f"a tool of an MCP server: {MCP_ANSWER!r} is not in {said!r}"
            said = project.run([*run, *resume, THANKS])
            assert WELCOME in said, f"the resumed session: {WELCOME!r} is not in {said!r}"
    tried(name, version, *client.tried)


main()
