package authn

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	tokencache "k8s.io/apiserver/pkg/authentication/token/cache"
	"k8s.io/apiserver/pkg/authentication/user"
)

// A hanging lookup continues while any caller waits, and is canceled when the last caller leaves. The next caller
// starts another lookup.
func TestALookupEndsWithItsLastCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls, ended, hangs := 0, 0, true
		slow := authenticator.TokenFunc(func(ctx context.Context, _ string) (*authenticator.Response, bool, error) {
			if calls++; !hangs {
				return &authenticator.Response{User: &user.DefaultInfo{Name: "bob"}}, true, nil
			}
			<-ctx.Done()
			ended++
			return nil, false, ctx.Err()
		})
		var l tokenLookups
		cached := tokencache.New(tokencache.New(l.boundToCallers(slow), false, time.Minute, 0), true, time.Minute, 0)
		tokens := l.trackCallers(func() authenticator.Token { return cached })
		errs := make(chan error)
		var leave [2]context.CancelFunc
		for i := range leave {
			ctx, cancel := context.WithCancel(t.Context())
			leave[i] = cancel
			go func() { _, _, err := tokens.AuthenticateToken(ctx, "t"); errs <- err }()
		}
		synctest.Wait()
		leave[0]()
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		synctest.Wait()
		if calls != 1 || ended != 0 {
			t.Errorf("called %d times, ended %d, while a caller waits", calls, ended)
		}
		leave[1]()
		<-errs
		synctest.Wait()
		if ended != 1 || len(l.byToken) != 0 {
			t.Errorf("ended %d times, %d lookups are left", ended, len(l.byToken))
		}
		hangs = false
		if resp, ok, err := tokens.AuthenticateToken(t.Context(), "t"); err != nil || !ok ||
			resp.User.GetName() != "bob" {
			t.Errorf("%+v %v %v", resp, ok, err)
		}
	})
}
