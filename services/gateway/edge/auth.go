// Package edge is the gateway's outer side: TLS, the filters that every request passes, and who may pass.
package edge

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// rpcTimeout bounds one question to authn or authz.
const rpcTimeout = 10 * time.Second

// Authenticator asks authn, and keeps its answers for as long as authn says.
type Authenticator struct {
	Client authnv1.AuthnClient
	// Headers that carry identities beside Authorization: the front proxy's.
	Headers []string

	mu    sync.RWMutex
	known map[string]knownUser
}

type knownUser struct {
	response *authenticator.Response
	consumed []string
	until    time.Time
}

// maxKnown bounds the remembered credentials; past it all are forgotten.
const maxKnown = 20000

// AuthenticateRequest implements authenticator.Request. It fails closed: an authn that cannot be asked is an error.
func (a *Authenticator) AuthenticateRequest(req *http.Request) (*authenticator.Response, bool, error) {
	r := &authnv1.AuthenticateRequest{Path: req.URL.Path, Headers: map[string]*commonv1.Values{}}
	var key strings.Builder
	add := func(name string) {
		if v := req.Header.Values(name); len(v) > 0 {
			r.Headers[name] = &commonv1.Values{Values: v}
			for _, s := range v {
				key.WriteString(name + "\x00" + s + "\x00")
			}
		}
	}
	add("Authorization")
	if strings.Contains(req.Header.Get("Sec-Websocket-Protocol"), "base64url.bearer") {
		add("Sec-Websocket-Protocol")
		add("Connection")
		add("Upgrade")
	}
	for name := range req.Header {
		for _, h := range a.Headers {
			if strings.EqualFold(name, h) || strings.HasSuffix(h, "-") && len(name) > len(h) && strings.EqualFold(name[:len(h)], h) {
				add(name)
			}
		}
	}
	if req.TLS != nil {
		for i, c := range req.TLS.PeerCertificates {
			r.PeerCertificates = append(r.PeerCertificates, c.Raw)
			if i == 0 {
				key.Write(c.Raw)
			}
		}
	}
	anonymous := key.Len() == 0
	if !anonymous {
		a.mu.RLock()
		k, ok := a.known[key.String()]
		a.mu.RUnlock()
		if ok && time.Now().Before(k.until) {
			return finish(req, k), true, nil
		}
	}
	ctx, cancel := context.WithTimeout(req.Context(), rpcTimeout)
	defer cancel()
	resp, err := a.Client.Authenticate(ctx, r)
	if err != nil {
		return nil, false, rpc.FromStatus(err)
	}
	if !resp.Authenticated {
		if resp.Error != "" {
			return nil, false, errors.New(resp.Error)
		}
		return nil, false, nil
	}
	k := knownUser{&authenticator.Response{User: identity.User(resp.User), Audiences: resp.Audiences}, resp.ConsumedHeaders, time.Now().Add(time.Duration(resp.CacheMilliseconds) * time.Millisecond)}
	if resp.CacheMilliseconds > 0 && !anonymous {
		a.mu.Lock()
		if a.known == nil || len(a.known) >= maxKnown {
			a.known = map[string]knownUser{}
		}
		a.known[key.String()] = k
		a.mu.Unlock()
	}
	return finish(req, k), true, nil
}

// finish takes the credentials out of the request, lest they travel on.
func finish(req *http.Request, k knownUser) *authenticator.Response {
	for _, h := range k.consumed {
		req.Header.Del(h)
	}
	return &authenticator.Response{User: k.response.User, Audiences: k.response.Audiences}
}

// Authorizer asks authz, and keeps its decisions until the policy's generation moves.
type Authorizer struct {
	Client authzv1.AuthzClient

	mu         sync.RWMutex
	generation *authzv1.Generation
	decisions  map[string]decision
	changed    chan struct{}
	// moves counts the changes of generation.
	moves  int64
	asking singleflight.Group
}

type decision struct {
	decision authorizer.Decision
	reason   string
}

const maxDecisions = 50000

// Follow drops decisions as the policy changes, until ctx is done.
func (a *Authorizer) Follow(ctx context.Context) {
	for ctx.Err() == nil {
		stream, err := a.Client.Generations(ctx, &authzv1.GenerationsRequest{})
		for err == nil {
			var g *authzv1.Generation
			if g, err = stream.Recv(); err == nil {
				a.moved(g)
			}
		}
		a.moved(nil) // nobody tells of changes now: nothing may be remembered
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// moved makes g the generation that decisions must be of; nil means that it is not known.
func (a *Authorizer) moved(g *authzv1.Generation) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.generation = g
	a.decisions = map[string]decision{}
	a.moves++
	if a.changed != nil {
		close(a.changed)
		a.changed = nil
	}
}

// Moved is closed when the policy's generation moves.
func (a *Authorizer) Moved() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.changed == nil {
		a.changed = make(chan struct{})
	}
	return a.changed
}

// Still says whether what was once allowed still is. It is true where nobody can be asked. Many who ask the same at once,
// as watches do when the generation has moved, cost authz one question.
func (a *Authorizer) Still(ctx context.Context, attrs authorizer.Attributes) bool {
	key := keyOf(attrs)
	for try := 0; ; try++ {
		if d, ok := a.kept(key); ok { // as when the watch is only now being opened
			return d.decision == authorizer.DecisionAllow
		}
		a.mu.RLock()
		moves, generation := a.moves, a.generation
		a.mu.RUnlock()
		if key == "" {
			return a.still(ctx, attrs, generation) != denied
		}
		// Who asks after a move does not join those who asked before it.
		answer, _, _ := a.asking.Do(strconv.FormatInt(moves, 10)+key, func() (any, error) {
			return a.still(context.WithoutCancel(ctx), attrs, generation), nil
		})
		if answer != unsettled || try == stillTries {
			return answer != denied
		}
		select {
		case <-ctx.Done():
			return true
		case <-time.After(stillPause):
		}
	}
}

const (
	// stillTries and stillPause bound how often a permission is asked for again until an answer is of the generation that is known.
	stillTries = 20
	stillPause = 100 * time.Millisecond
)

type verdict int

const (
	denied verdict = iota
	allowed
	// unsettled: allowed, by a replica that may not have seen yet what has changed.
	unsettled
)

func (a *Authorizer) still(ctx context.Context, attrs authorizer.Attributes, known *authzv1.Generation) verdict {
	resp, err := a.Ask(ctx, identity.AttributesProto(attrs))
	switch {
	case err != nil:
		return allowed // what is open stays open
	case identity.Decision(resp.Decision) != authorizer.DecisionAllow:
		return denied
	case resp.Generation != 0 && known != nil && (resp.Replica != known.Replica || resp.Generation < known.Generation):
		return unsettled
	}
	return allowed
}

// Authorize implements authorizer.Authorizer.
func (a *Authorizer) Authorize(ctx context.Context, attrs authorizer.Attributes) (authorizer.Decision, string, error) {
	key := keyOf(attrs)
	if d, ok := a.kept(key); ok {
		return d.decision, d.reason, nil
	}
	resp, err := a.Ask(ctx, identity.AttributesProto(attrs))
	if err != nil {
		return authorizer.DecisionDeny, "", err
	}
	d := decision{identity.Decision(resp.Decision), resp.Reason}
	if resp.EvaluationError != "" {
		return d.decision, d.reason, errors.New(resp.EvaluationError)
	}
	if key != "" && resp.Generation != 0 {
		a.mu.Lock()
		if g := a.generation; g != nil && g.Replica == resp.Replica && resp.Generation >= g.Generation {
			if len(a.decisions) >= maxDecisions {
				a.decisions = map[string]decision{}
			}
			a.decisions[key] = d
		}
		a.mu.Unlock()
	}
	return d.decision, d.reason, nil
}

// kept is the decision of the current generation, if one was made; key is not empty for any that is kept.
func (a *Authorizer) kept(key string) (decision, bool) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	d, ok := a.decisions[key]
	return d, ok
}

// Ask is Authorize in the contract's words. It is not remembered.
func (a *Authorizer) Ask(ctx context.Context, attrs *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, rpcTimeout)
	defer cancel()
	resp, err := a.Client.Authorize(ctx, &authzv1.AuthorizeRequest{Attributes: attrs})
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	return resp, nil
}

// keyOf is everything that a decision may depend on; empty where the selectors did not parse.
func keyOf(a authorizer.Attributes) string {
	var b strings.Builder
	w := func(s string) { b.WriteString(s); b.WriteByte(0) }
	writeUser(w, a.GetUser())
	w(a.GetVerb())
	if !a.IsResourceRequest() {
		w(a.GetPath())
		return b.String()
	}
	w(a.GetAPIGroup())
	w(a.GetAPIVersion())
	w(a.GetResource())
	w(a.GetSubresource())
	w(a.GetNamespace())
	w(a.GetName())
	fields, err := a.GetFieldSelector()
	if err != nil {
		return ""
	}
	for _, f := range fields {
		w(f.Field + string(f.Operator) + f.Value)
	}
	w("labels")
	labels, err := a.GetLabelSelector()
	if err != nil {
		return ""
	}
	for _, l := range labels {
		w(l.String())
	}
	return b.String()
}

func writeUser(w func(string), u user.Info) {
	if u == nil {
		return
	}
	w(u.GetName())
	w(u.GetUID())
	for _, g := range u.GetGroups() {
		w(g)
	}
	w("extra")
	for _, k := range sortedKeys(u.GetExtra()) {
		w(k)
		for _, v := range u.GetExtra()[k] {
			w(v)
		}
	}
}
