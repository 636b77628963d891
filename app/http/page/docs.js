// The page at "/docs": an example, then Swagger UI with the OpenAPI document of this service.

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();

document.getElementById("origin").textContent = new URL(".", location.href).href;

// Swagger UI lacks these for keyboards and screen readers: a selector, and what to do with each element it finds.
const parameter = (node) => node.closest("[data-param-name]")?.dataset.paramName ?? (node.type === "file" ? "images" : "content type");
const MENDS = {
  "h3.opblock-tag": (node) => node.setAttribute("aria-level", 2),
  h4: (node) => node.setAttribute("aria-level", 3),
  ".opblock-summary-control a[href]": (node) => node.removeAttribute("href"), // A link inside the button that opens it.
  "table[role=region]": (node) => node.setAttribute("aria-label", node.id.replaceAll("_", " ")),
  ".microlight:not([tabindex])": (node) => (node.tabIndex = 0), // It scrolls.
  "select:not([aria-label]), input[type=file]:not([aria-label])": (node) => node.setAttribute("aria-label", parameter(node)),
};
function mend() {
  for (const [selector, change] of Object.entries(MENDS)) view.querySelectorAll(selector).forEach(change);
}
const view = document.getElementById("interface");
new MutationObserver(mend).observe(view, { childList: true, subtree: true });

window.SwaggerUIBundle({ url: "openapi.json", dom_id: "#interface", deepLinking: true, validatorUrl: null });
