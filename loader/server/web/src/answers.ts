// The last of the later scripts: what answers are rendered with, over the libraries before it.
import { Markdown, rehearsals } from "./markdown";
const shared = (globalThis as any).shardpack;
// What a browser compiles at its first use is compiled before an answer streams.
shared.steps.push(() => { shared.Markdown = Markdown; }, ...rehearsals);
