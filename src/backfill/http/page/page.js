// Starts the parts of the page.

import { getJson, key } from "./api.js";
import { Batches } from "./batches.js";
import { Chat } from "./chat.js";
import { Live } from "./live.js";

const element = (id) => document.getElementById(id);
const dialog = element("key-dialog");
let isAsked = false;

function askForKey(reason) {
  if (dialog.open) return;
  element("key-reason").textContent = reason;
  element("key-input").value = key.get();
  dialog.showModal();
}

document.addEventListener("key-needed", () => {
  if (isAsked) return; // once: the button asks again
  isAsked = true;
  const reason = key.get() ? "The server refused this API key." : "This server needs an API key.";
  askForKey(`${reason} It is kept until this tab is closed.`);
});
element("key-button").addEventListener("click", () => askForKey("It is kept until this tab is closed."));
dialog.addEventListener("close", () => {
  if (dialog.returnValue !== "save") return;
  key.set(element("key-input").value.trim());
  isAsked = false;
  showModel();
  batches.read();
});

let wasReady = false;
function showStatus(state, words) {
  const status = element("status");
  if (status.textContent !== words) status.textContent = words;
  status.dataset.state = state;
  if (state === "ready" && !wasReady) showModel(); // perhaps another server
  wasReady = state === "ready";
}

async function showModel() {
  try {
    const [model] = (await getJson("v1/models")).data;
    element("model").textContent = `${model.id}, context of ${model.max_model_len.toLocaleString("en")} tokens`;
  } catch {
    element("model").textContent = "";
  }
}

new Chat();
const batches = new Batches();
new Live(showStatus).run();
batches.run();
