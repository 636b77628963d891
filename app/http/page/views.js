// The views of the page, each with an address of its own: images to try, the review queue, and the live service.

const links = [...document.querySelectorAll("#views a")];
let acts = {};
let model = null;

export function startViews(chosen) {
  acts = chosen;
  addEventListener("hashchange", show);
  for (const kind of ["drop", "paste"]) {
    document.addEventListener(kind, ({ dataTransfer, clipboardData }) => {
      if ((dataTransfer ?? clipboardData).files.length > 0) location.hash = ""; // Where the images go.
    });
  }
}

// Offer the views that a model has, and show the one that the address names.
export function offerViews(served) {
  model = served;
  links.find(({ hash }) => hash === "#review").hidden = !model.feedback;
  document.getElementById("views").hidden = links.filter((link) => !link.hidden).length < 2;
  show();
}

function show() {
  const open = links.find((link) => link.hash === location.hash && !link.hidden) ?? links[0];
  for (const link of links) {
    if (link === open) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    const view = document.querySelector(`${link.hash}.view`);
    if (view) view.hidden = link !== open || model === null;
  }
  if (model) acts[open.hash]?.(model);
}
