// Runs in the browser for site_check.py: each page in a frame of each width, measured. `job` is defined before.
const frame = document.createElement("iframe");
frame.style.cssText = "border:0;height:900px;display:block";
document.body.style.margin = "0";
document.body.append(frame);
const pause = (ms) => new Promise((go) => setTimeout(go, ms));

function show(page, width) {
  frame.style.width = `${width}px`;
  return new Promise((go) => {
    frame.onload = async () => {
      const view = frame.contentDocument;
      for (const image of view.images) image.loading = "eager";
      await view.fonts.ready;
      await Promise.all([...view.images].map((image) => image.decode().catch(() => null)));
      go(view);
    };
    frame.src = `/${page}`;
  });
}

function scrolls(element, view) {
  for (let at = element; at && at !== view.body; at = at.parentElement)
    if (["auto", "scroll"].includes(view.defaultView.getComputedStyle(at).overflowX)) return true;
  return false;
}

function measure(page, width, view) {
  const findings = [], root = view.documentElement, where = `${page} at ${width} px`;
  if (root.scrollWidth > root.clientWidth + 1)
    findings.push(`${where}: the page is ${root.scrollWidth} px wide and scrolls sideways`);
  for (const image of view.images)
    if (image.naturalWidth === 0) findings.push(`${where}: no picture ${image.getAttribute("src")}`);
  let told = 0;
  for (const element of view.querySelectorAll("article *, main *")) {
    const box = element.getBoundingClientRect(), style = view.defaultView.getComputedStyle(element);
    if (box.width < 2 || box.height < 2 || style.visibility === "hidden" || style.clip !== "auto") continue;
    const cut = element.scrollWidth > element.clientWidth + 1 && ["hidden", "clip"].includes(style.overflowX);
    const out = box.right > root.clientWidth + 1 && !scrolls(element, view);
    if ((cut || out) && told++ < 3) {
      const what = `<${element.tagName.toLowerCase()}> "${element.textContent.trim().slice(0, 60)}"`;
      findings.push(`${where}: ${what} ${cut ? "is cut off" : "hangs out of the page"}`);
    }
  }
  return findings;
}

async function search(words) {
  const view = await show(`search.html?q=${words}`, 1280);
  for (let tries = 0; tries < 50; tries++) {
    const links = [...view.querySelectorAll("#search-results li a")].map((a) => a.textContent);
    if (links.some((text) => text) && /found|matching/i.test(view.querySelector("#search-results p")?.textContent ?? ""))
      return links;
    await pause(200);
  }
  return [];
}

(async () => {
  const findings = [];
  let seen = 0;
  for (const width of job.widths)
    for (const page of job.pages) {
      findings.push(...measure(page, width, await show(page, width)));
      seen++;
    }
  const results = job.search ? await search(job.search) : [];
  await fetch("/__found", { method: "POST", body: JSON.stringify({ findings, seen, results }) });
})();
