// The second script of the page: what answers are rendered with.
import { Markdown, rehearse } from "./markdown";
(globalThis as any).shardpack.Markdown = Markdown;
// What a browser compiles at its first use is compiled before an answer streams.
rehearse();
