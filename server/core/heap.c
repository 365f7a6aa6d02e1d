#include "server/core/heap.h"

#include <stddef.h>

static bool is_before(const struct srv_heap_node *a, const struct srv_heap_node *b)
{
    return a->major != b->major ? a->major < b->major : a->minor < b->minor;
}

/* Two roots become one: the later one is the first child of the earlier. */
static struct srv_heap_node *meld(struct srv_heap_node *a, struct srv_heap_node *b)
{
    if (is_before(b, a)) {
        struct srv_heap_node *t = a;
        a = b;
        b = t;
    }
    b->next = a->child;
    b->prev = a;
    if (a->child)
        a->child->prev = b;
    a->child = b;
    a->next = a->prev = NULL;
    return a;
}

/* A row of siblings becomes one tree. Pairs from the left, then one by one from the right: this order gives
 * the logarithmic bound. Loops, as a recursion could be as deep as the heap is large. */
static struct srv_heap_node *meld_siblings(struct srv_heap_node *first)
{
    struct srv_heap_node *pairs = NULL, *root = NULL;

    while (first) {
        struct srv_heap_node *a = first, *b = a->next;

        first = b ? b->next : NULL;
        a = b ? meld(a, b) : a;
        a->next = pairs;
        pairs = a;
    }
    while (pairs) {
        struct srv_heap_node *a = pairs;

        pairs = a->next;
        root = root ? meld(root, a) : a;
    }
    if (root)
        root->next = root->prev = NULL;
    return root;
}

void srv_heap_add(struct srv_heap *heap, struct srv_heap_node *node, uint64_t major, uint64_t minor)
{
    *node = (struct srv_heap_node){.major = major, .minor = minor};
    heap->root = heap->root ? meld(heap->root, node) : node;
}

void srv_heap_remove(struct srv_heap *heap, struct srv_heap_node *node)
{
    struct srv_heap_node *rest = meld_siblings(node->child);

    if (heap->root == node) {
        heap->root = rest;
    } else {
        if (node->prev->child == node)
            node->prev->child = node->next;
        else
            node->prev->next = node->next;
        if (node->next)
            node->next->prev = node->prev;
        if (rest)
            heap->root = meld(heap->root, rest);
    }
    node->child = node->next = node->prev = NULL;
}
