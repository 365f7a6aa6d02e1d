/* err.h - what went wrong, filled once by the first function that knows. Pure; any thread.
 * Every function of the pure core that can fail takes a struct srv_err * last but its out-arguments (NULL is
 * fine). */
#ifndef SERVER_CORE_ERR_H
#define SERVER_CORE_ERR_H

#include "dsa_status.h" /* the contract shared with clients; proto/ */

#define SRV_MUST_CHECK __attribute__((warn_unused_result))

struct srv_err {
    dsa_status code;
    char field[64];                    /* path of the offending field; may be empty */
    char value[40];                    /* its value as text; may be empty */
    char text[160];                    /* one sentence */
    char rule[40];                     /* support rule that said no; may be empty */
    unsigned long long retry_after_us; /* 0 = not worth it */
    const char *file;
    int line;
};

/* srv_fail(err, code, "field", "%" PRIu64, value, "text"): fills err and returns code. The value is formatted
 * with one conversion; pass "%s", "" for none. Sets rule and retry_after_us to none. Texts are cut where
 * they do not fit, and bytes other than printable ASCII become '?'. */
#define srv_fail(err, code, field, value_format, value, ...)                                                 \
    srv_err_code(code, srv_err_set(err, code, field, __FILE__, __LINE__,                                     \
                                   srv_err_value(err, value_format, value), __VA_ARGS__))

/* The code once more, where the compiler sees it: it can then tell that out-arguments are written on
 * success. */
static inline dsa_status srv_err_code(dsa_status code, dsa_status code_set)
{
    (void)code_set;
    return code;
}

__attribute__((format(printf, 2, 3))) int srv_err_value(struct srv_err *err, const char *format, ...);
__attribute__((format(printf, 7, 8))) dsa_status srv_err_set(struct srv_err *err, dsa_status code,
                                                             const char *field, const char *file, int line,
                                                             int value_is_set, const char *text, ...);
void srv_err_clear(struct srv_err *err);
/* Puts the path of the enclosing message before the field: "append." makes "rows" "append.rows". NULL err is fine. */
void srv_err_prefix(struct srv_err *err, const char *prefix);

/* A broken invariant ends the process, in release builds too. */
#define SRV_ASSERT(cond)                                                                                     \
    do {                                                                                                     \
        if (__builtin_expect(!(cond), 0))                                                                    \
            srv_assert_failed(#cond, __FILE__, __LINE__);                                                    \
    } while (0)
_Noreturn void srv_assert_failed(const char *cond, const char *file, int line);

#endif /* SERVER_CORE_ERR_H */
