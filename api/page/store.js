// Storage of conversations in this browser (IndexedDB).

const STORE = "conversations";
let opened = null;

function database() {
  opened ||= new Promise((resolve, reject) => {
    const request = indexedDB.open("tokamak", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function perform(mode, action) {
  const transaction = (await database()).transaction(STORE, mode);
  const request = action(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export const all = async () => (await perform("readonly", (store) => store.getAll())).sort((a, b) => b.changed - a.changed);
export const keep = (tree) => perform("readwrite", (store) => store.put(tree));
export const forget = (id) => perform("readwrite", (store) => store.delete(id));

// Returns whether the title and messages of a conversation contain all words.
export function holds(tree, words) {
  const text = [tree.title, ...Object.values(tree.nodes).map((node) => node.content)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}
