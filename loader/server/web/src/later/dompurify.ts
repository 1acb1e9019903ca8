import DOMPurify from "dompurify";
(globalThis as any).shardpack["dompurify"] = DOMPurify;
