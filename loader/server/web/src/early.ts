// The only script that is read at once: the theme that was chosen here, and the page's own script after the
// first paint, which does not wait for it.
try { const theme = localStorage.getItem("theme"); if (theme) document.documentElement.dataset.theme = theme; } catch { /* not remembered */ }
const text = document.querySelector('script[type="text/plain"]')!, main = document.createElement("script");
// The policy names the hash of this text too.
main.textContent = text.textContent;
text.remove();
requestAnimationFrame(() => setTimeout(() => { document.head.append(main); main.remove(); }));
