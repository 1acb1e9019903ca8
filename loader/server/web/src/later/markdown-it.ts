import MarkdownIt from "markdown-it";
(globalThis as any).shardpack["markdown-it"] = MarkdownIt;
