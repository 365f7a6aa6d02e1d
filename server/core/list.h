/* list.h - intrusive circular list, for the pure core only. A node that is in no list points to itself, so
 * that removing it again does nothing. Same thread as the structure it is part of. */
#ifndef SERVER_CORE_LIST_H
#define SERVER_CORE_LIST_H

#include <stdbool.h>
#include <stddef.h>

/* The struct that holds *ptr as its member. */
#define SRV_CONTAINER_OF(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

struct srv_list {
    struct srv_list *next, *prev;
};

static inline void srv_list_init(struct srv_list *list)
{
    list->next = list->prev = list;
}

static inline bool srv_list_is_empty(const struct srv_list *list)
{
    return list->next == list;
}

static inline void srv_list_add_tail(struct srv_list *list, struct srv_list *node)
{
    node->next = list;
    node->prev = list->prev;
    list->prev->next = node;
    list->prev = node;
}

static inline void srv_list_remove(struct srv_list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    srv_list_init(node);
}

#endif /* SERVER_CORE_LIST_H */
