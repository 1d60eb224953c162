// A conversation: what the model wrote in each turn, its calls, and the answers to it.

import { h, clock, number, pictures } from "./dom.js";
import { tokens } from "./shading.js";

const opening = (prompt) => (prompt
  ? h("article", { class: "message answer" }, h("header", {}, h("b", {}, "prompt"), h("span", {}, "what the model read first")), h("pre", {}, prompt)) : null);

// The same without tokens, for what an evaluation recorded.
export function transcript({ prompt, turns }) {
  return h("div", { class: "turns" }, opening(prompt), turns.map((turn) => [
    h("article", { class: "message model" }, h("header", {}, h("b", {}, "model")), h("pre", {}, turn.text)),
    turn.messages.map((message) => h("article", { class: "message answer" }, h("header", {}, h("b", {}, message.role)), h("pre", {}, message.content), pictures(message.pictures))),
  ]));
}

export function conversation(data, kind, readout) {
  return h("div", { class: "turns" }, opening(data.prompt), data.turns.map((turn, n) => [
    h("article", { class: "message model" },
      h("header", {}, h("b", {}, "model"), h("span", {}, `turn ${n + 1}`),
        turn.sequence && turn.sequence !== data.turns[n - 1].sequence ? h("span", {}, "of a new sequence: the template rewrote the turns before") : null,
        turn.reward === null ? null : h("span", {}, `reward ${number(turn.reward)}`),
        h("span", {}, `answered after ${clock(turn.seconds)}`)),
      tokens({ ...data, ...turn }, kind, readout, data.versions)),
    turn.calls.map(call),
    turn.messages.map((message) => (message.role === "tool" ? pictures(message.pictures)
      : h("article", { class: "message answer" }, h("header", {}, h("b", {}, message.role)), h("pre", {}, message.content), pictures(message.pictures)))),
  ]));
}

function call({ name, arguments: given, answer, error, seconds }) {
  return h("article", { class: error ? "message answer failed" : "message answer" },
    h("header", {}, h("b", {}, name || "a call that cannot be read"), error ? h("span", {}, "error") : null, h("span", {}, clock(seconds))),
    name ? h("pre", {}, given) : null, h("pre", {}, answer));
}
