// The colours of code; languages come after it (`build.mjs`).
import hljs from "highlight.js/lib/core";
(globalThis as any).shardpack["highlight.js/lib/core"] = hljs;
