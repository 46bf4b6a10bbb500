package authn

import (
	"context"
	"errors"
	"sync"

	"k8s.io/apiserver/pkg/authentication/authenticator"
)

// lookups ends the lookup of a token when the last caller that waits for it has left. Upstream's cache shares a lookup
// among callers, and detaches it from their contexts for 30 s (k8s.io/apiserver/pkg/authentication/token/cache,
// sharedLookupTimeout): a webhook that hangs would be asked on behalf of clients that are gone. Its zero value is
// ready.
type lookups struct {
	mu      sync.Mutex
	byToken map[string]*lookup
}

// lookup is the interest in one token.
type lookup struct {
	ctx     context.Context
	cancel  context.CancelFunc
	callers int
}

// retries bounds how often a caller asks again that came upon a lookup which was just given up.
const retries = 3

// counted counts the callers of next, which is a cache.
func (l *lookups) counted(next func() authenticator.Token) authenticator.Token {
	return authenticator.TokenFunc(func(ctx context.Context, token string) (resp *authenticator.Response, ok bool,
		err error) {
		defer l.join(token)()
		for range retries {
			resp, ok, err = next().AuthenticateToken(ctx, token)
			if ctx.Err() != nil || !errors.Is(err, context.Canceled) {
				break
			}
		}
		return resp, ok, err
	})
}

// join counts a caller until leave is called.
func (l *lookups) join(token string) (leave func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	of := l.byToken[token]
	if of == nil {
		if l.byToken == nil {
			l.byToken = map[string]*lookup{}
		}
		of = &lookup{}
		of.ctx, of.cancel = context.WithCancel(context.Background())
		l.byToken[token] = of
	}
	of.callers++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if of.callers--; of.callers == 0 {
			of.cancel()
			delete(l.byToken, token)
		}
	}
}

// bounded asks next, which may take long, for as long as a caller waits.
func (l *lookups) bounded(next authenticator.Token) authenticator.Token {
	return authenticator.TokenFunc(func(ctx context.Context, token string) (*authenticator.Response, bool, error) {
		l.mu.Lock()
		of := l.byToken[token]
		l.mu.Unlock()
		if of == nil {
			return nil, false, context.Canceled
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(of.ctx, cancel)()
		return next.AuthenticateToken(ctx, token)
	})
}
