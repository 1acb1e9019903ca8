// Small parts: icons, buttons, dialogs.
import { useEffect, useRef, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { t } from "./strings";
const PATHS: Record<string, string> = {
    plus: "M12 5v14M5 12h14", send: "M12 19V5M6 11l6-6 6 6", stop: "M7 7h10v10H7z", copy: "M9 9h11v11H9zM5 15H4V4h11v1", check: "M5 12l5 5 9-10",
    edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4", retry: "M20 11a8 8 0 1 0-2 6M20 5v6h-6", trash: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13", left: "M14 6l-6 6 6 6", right: "M10 6l6 6-6 6",
    menu: "M4 7h16M4 12h16M4 17h16", gear: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4", chart: "M4 19V5M4 19h16M8 15l4-5 3 3 5-7", moon: "M20 14A8 8 0 0 1 10 4a8 8 0 1 0 10 10z",
    clip: "M20 11l-8 8a5 5 0 0 1-7-7l8-8a3.3 3.3 0 0 1 5 5l-8 8a1.700 1.700 0 0 1-2.500-2.500l7-7", close: "M6 6l12 12M18 6L6 18", down: "M12 4v12M6 11l6 6 6-6M5 20h14", up: "M12 17V4M6 9l6-6 6 6M5 20h14", keys: "M3 7h18v10H3zM7 14h10M7 10.500h.01M12 10.500h.01M17 10.500h.01", flask: "M9 4h6M10 4v6l-5 8a1.500 1.500 0 0 0 1.300 2.200h11.400A1.500 1.500 0 0 0 19 18l-5-8V4M8 15h8", tool: "M14 6a4 4 0 0 0-5 5l-6 6 3 3 6-6a4 4 0 0 0 5-5l-3 2-2-2z",
};
export const Icon = ({ name }: { name: string }) => <svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d={PATHS[name]} /></svg>;
export const Button = ({ icon, label, onClick, kind = "", disabled = false }: { icon: string; label: string; onClick: () => void; kind?: string; disabled?: boolean }) =>
    <button type="button" class={"quiet " + kind} title={label} aria-label={label} onClick={onClick} disabled={disabled}><Icon name={icon} /></button>;
export async function copyText(text: string) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    // Plain http from another machine has no clipboard.
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
}
export function Copy({ text }: { text: () => string }) {
    const [done, setDone] = useState(false);
    const copy = async () => { try { await copyText(text()); setDone(true); setTimeout(() => setDone(false), 1500); } catch { /* refused by the browser */ } };
    return <Button icon={done ? "check" : "copy"} label={done ? t.copied : t.copy} onClick={copy} />;
}
export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ComponentChildren }) {
    const ref = useRef<HTMLDialogElement>(null);
    useEffect(() => { ref.current!.showModal(); }, []);
    return <dialog ref={ref} aria-label={title} onClose={onClose} onClick={(event) => event.target === ref.current && ref.current!.close()}>
        <div class="sheet"><header><h2>{title}</h2><Button icon="close" label={t.close} onClick={() => ref.current!.close()} /></header>{children}</div></dialog>;
}
export const seconds = (ms: number) => ms < 10_000 ? (ms / 1000).toFixed(1) + " s" : ms < 60_000 ? Math.round(ms / 1000) + " s" : `${Math.floor(ms / 60_000)} min ${Math.round(ms % 60_000 / 1000)} s`;
export function size(bytes: number) {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (bytes < 1024) return bytes.toFixed(unit === "B" ? 0 : 1) + " " + unit; bytes /= 1024; }
    return bytes.toFixed(1) + " TiB";
}
export function download(name: string, text: string, type: string) {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click(); setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
export const pick = (multiple: boolean, accept = "") => new Promise<File[]>((done) => {
    const input = Object.assign(document.createElement("input"), { type: "file", multiple, accept });
    input.onchange = () => done([...input.files!]); input.click();
});
