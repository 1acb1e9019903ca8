import katex from "katex";
(globalThis as any).shardpack["katex"] = katex;
