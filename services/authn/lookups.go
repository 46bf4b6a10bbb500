package authn

import (
	"context"
	"errors"
	"sync"

	"k8s.io/apiserver/pkg/authentication/authenticator"
)

// tokenLookups cancels the lookup of a token when its last waiting caller leaves. Upstream's cache shares a lookup
// among callers and detaches it from their contexts for 30 s (k8s.io/apiserver/pkg/authentication/token/cache,
// sharedLookupTimeout). A hanging webhook would therefore serve clients that are gone. The zero value is ready to use.
type tokenLookups struct {
	mu      sync.Mutex
	byToken map[string]*tokenLookup
}

// tokenLookup counts the callers that wait for one token.
type tokenLookup struct {
	ctx     context.Context
	cancel  context.CancelFunc
	callers int
}

// maxLookupRetries bounds the retries of a caller that joined a lookup just before its cancellation.
const maxLookupRetries = 3

// trackCallers counts the callers of next, which is a cache.
func (l *tokenLookups) trackCallers(next func() authenticator.Token) authenticator.Token {
	return authenticator.TokenFunc(func(ctx context.Context, token string) (resp *authenticator.Response, ok bool,
		err error) {
		defer l.join(token)()
		for range maxLookupRetries {
			resp, ok, err = next().AuthenticateToken(ctx, token)
			if ctx.Err() != nil || !errors.Is(err, context.Canceled) {
				break
			}
		}
		return resp, ok, err
	})
}

// join counts a caller until it calls leave.
func (l *tokenLookups) join(token string) (leave func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	entry := l.byToken[token]
	if entry == nil {
		if l.byToken == nil {
			l.byToken = map[string]*tokenLookup{}
		}
		entry = &tokenLookup{}
		entry.ctx, entry.cancel = context.WithCancel(context.Background())
		l.byToken[token] = entry
	}
	entry.callers++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if entry.callers--; entry.callers == 0 {
			entry.cancel()
			delete(l.byToken, token)
		}
	}
}

// boundToCallers calls next with a context that ends when no caller waits for the token.
func (l *tokenLookups) boundToCallers(next authenticator.Token) authenticator.Token {
	return authenticator.TokenFunc(func(ctx context.Context, token string) (*authenticator.Response, bool, error) {
		l.mu.Lock()
		entry := l.byToken[token]
		l.mu.Unlock()
		if entry == nil {
			return nil, false, context.Canceled
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(entry.ctx, cancel)()
		return next.AuthenticateToken(ctx, token)
	})
}
