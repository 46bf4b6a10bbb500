package authn

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	apiserverconfig "k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/group"
	"k8s.io/apiserver/pkg/authentication/request/anonymous"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/authentication/request/union"
	"k8s.io/apiserver/pkg/authentication/request/websocket"
	"k8s.io/apiserver/pkg/authentication/request/x509"
	tokencache "k8s.io/apiserver/pkg/authentication/token/cache"
	"k8s.io/apiserver/pkg/authentication/token/tokenfile"
	tokenunion "k8s.io/apiserver/pkg/authentication/token/union"
	webhookutil "k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/apiserver/plugin/pkg/authenticator/token/webhook"
	kubeauthenticator "k8s.io/kubernetes/pkg/kubeapiserver/authenticator"
	"k8s.io/kubernetes/pkg/serviceaccount"

	"watershed.dev/platform/reload"
)

var (
	attempts = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_authn_attempts_total",
		Help: "Credentials that an authenticator accepted (success) or rejected as invalid (error), by " +
			"authenticator. Credentials of another kind are not counted.",
	}, []string{"authenticator", "result"})
	deprecated = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_authn_deprecated",
		Help: "1 for each enabled authenticator that Kubernetes has removed.",
	}, []string{"authenticator"})
)

// chain is the authenticators in kube-apiserver's order, each of them upstream's own. Order and error handling follow
// Config.New of k8s.io/kubernetes/pkg/kubeapiserver/authenticator. The authenticators are built separately. A file can
// therefore be reloaded without the other authenticators, and metrics can name the authenticator of a credential.
type chain struct {
	config kubeauthenticator.Config
	// tokens, webhook, keys and passwords are reloaded when their files change.
	tokens, webhook atomicValue[authenticator.Token]
	keys            serviceaccount.PublicKeysGetter
	passwords       *passwords
	// cached is the cache of all token authenticators. Each reload of a file replaces it.
	cached atomicValue[authenticator.Token]
	union  authenticator.Token
	// lookups are the token lookups in progress.
	lookups tokenLookups
	// updateJWT applies an AuthenticationConfiguration.
	updateJWT func(context.Context, *apiserverconfig.AuthenticationConfiguration) error
}

// atomicValue holds a value that is replaced as a whole.
type atomicValue[T any] struct{ p atomic.Pointer[T] }

func (s *atomicValue[T]) get() T  { return *s.p.Load() }
func (s *atomicValue[T]) set(v T) { s.p.Store(&v) }

// newChain builds the authenticators of a configuration and basic authentication, which kube-apiserver no longer has.
// It adds their files to files.
func newChain(ctx context.Context, c kubeauthenticator.Config, basic string,
	files *reload.Files) (*chain, authenticator.Request, error) {
	h := &chain{config: c, keys: c.ServiceAccountPublicKeysGetter}
	if err := h.tokenChain(ctx, files); err != nil {
		return nil, nil, err
	}
	h.resetTokenCache()
	// kube-apiserver first checks a loopback token of its own (k8s.io/apiserver/pkg/server,
	// AuthorizeClientBearerToken). There is none here. Its authenticator remains only for its error on an unknown
	// token, which a TokenReview returns.
	all := []authenticator.Request{bearertoken.New(authenticator.TokenFunc(
		func(context.Context, string) (*authenticator.Response, bool, error) { return nil, false, nil }))}
	add := func(name string, r authenticator.Request) { all = append(all, instrument(name, r)) }
	if rh := c.RequestHeaderConfig; rh != nil {
		add("requestheader", authenticator.WrapAudienceAgnosticRequest(c.APIAudiences,
			headerrequest.NewDynamicVerifyOptionsSecure(rh.CAContentProvider.VerifyOptions, rh.AllowedClientNames,
				rh.UsernameHeaders, rh.UIDHeaders, rh.GroupHeaders, rh.ExtraHeaderPrefixes)))
	}
	if basic != "" { // at its place in Kubernetes before 1.19
		var err error
		if h.passwords, err = newPasswords(ctx, basic, files); err != nil {
			return nil, nil, err
		}
		add("basic", authenticator.WrapAudienceAgnosticRequest(c.APIAudiences, h.passwords))
	}
	if c.ClientCAContentProvider != nil {
		add("x509", x509.NewDynamic(c.ClientCAContentProvider.VerifyOptions, x509.CommonNameUserConversion))
	}
	if h.union != nil {
		tokens := withoutLong(h.lookups.trackCallers(h.cached.get))
		all = append(all, bearertoken.New(tokens), websocket.NewProtocolAuthenticator(tokens))
	}
	return h, h.anonymous(group.NewAuthenticatedGroupAdder(union.New(all...))), nil
}

// maxBearerBytes bounds a bearer token, in bytes. go-jose decodes a JWT's header before it checks the signature, and
// does not bound the depth of JSON.
const maxBearerBytes = 64 << 10

// withoutLong returns an authenticator that knows no token above maxBearerBytes: the client gets 401. kube-apiserver
// has no such bound.
func withoutLong(tokens authenticator.Token) authenticator.Token {
	return authenticator.TokenFunc(func(ctx context.Context, token string) (*authenticator.Response, bool, error) {
		if len(token) > maxBearerBytes {
			return nil, false, nil
		}
		return tokens.AuthenticateToken(ctx, token)
	})
}

// anonymous authenticates requests without a credential if the configuration allows it. A request with a bad credential
// is not anonymous.
func (h *chain) anonymous(next authenticator.Request) authenticator.Request {
	if !h.config.Anonymous.Enabled {
		return next
	}
	return union.NewFailOnError(next, anonymous.NewAuthenticator(h.config.Anonymous.Conditions))
}

// tokenChain builds the authenticators of bearer tokens.
func (h *chain) tokenChain(ctx context.Context, files *reload.Files) error {
	c := &h.config
	var all []authenticator.Token
	add := func(name string, t authenticator.Token) { all = append(all, instrumentToken(name, t)) }
	if c.TokenAuthFile != "" {
		if err := h.tokenFile(ctx, files); err != nil {
			return err
		}
		add("tokenfile", authenticator.WrapAudienceAgnosticToken(c.APIAudiences, authenticator.TokenFunc(
			func(ctx context.Context, t string) (*authenticator.Response, bool, error) {
				return h.tokens.get().AuthenticateToken(ctx, t)
			})))
	}
	if h.keys != nil {
		legacy, err := serviceaccount.NewLegacyValidator(c.ServiceAccountLookup, c.ServiceAccountTokenGetter,
			c.SecretsWriter)
		if err != nil {
			return fmt.Errorf("--service-account-lookup: %w", err)
		}
		add("serviceaccount", serviceaccount.JWTTokenAuthenticator([]string{serviceaccount.LegacyIssuer}, h.keys,
			c.APIAudiences, legacy))
		if len(c.ServiceAccountIssuers) > 0 {
			add("serviceaccount", serviceaccount.JWTTokenAuthenticator(c.ServiceAccountIssuers, h.keys, c.APIAudiences,
				serviceaccount.NewValidator(c.ServiceAccountTokenGetter)))
		}
	}
	if c.BootstrapToken {
		add("bootstrap", authenticator.WrapAudienceAgnosticToken(c.APIAudiences, c.BootstrapTokenAuthenticator))
	}
	if c.AuthenticationConfig != nil {
		jwt, update, _, _, err := kubeauthenticator.Config{
			AuthenticationConfig:  c.AuthenticationConfig,
			OIDCSigningAlgs:       c.OIDCSigningAlgs,
			ServiceAccountIssuers: c.ServiceAccountIssuers,
			APIAudiences:          c.APIAudiences,
			APIServerID:           c.APIServerID,
			EgressLookup:          c.EgressLookup,
		}.New(ctx)
		if err != nil {
			return err
		}
		h.updateJWT = update
		add("jwt", tokenAdapter{jwt})
	}
	if c.WebhookTokenAuthnConfigFile != "" {
		if err := h.webhookFile(ctx, files); err != nil {
			return err
		}
		add("webhook", authenticator.TokenFunc(
			func(ctx context.Context, t string) (*authenticator.Response, bool, error) {
				return h.webhook.get().AuthenticateToken(ctx, t)
			}))
	}
	if len(all) > 0 {
		h.union = tokenunion.New(all...)
	}
	return nil
}

// resetTokenCache empties the token cache.
func (h *chain) resetTokenCache() {
	c := &h.config
	if h.union == nil {
		return
	}
	tokens := h.union
	if c.TokenSuccessCacheTTL > 0 || c.TokenFailureCacheTTL > 0 {
		tokens = tokencache.New(tokens, true, c.TokenSuccessCacheTTL, c.TokenFailureCacheTTL)
	}
	h.cached.set(tokens)
}

// tokenFile reads --token-auth-file now and after each change.
func (h *chain) tokenFile(ctx context.Context, files *reload.Files) error {
	path := h.config.TokenAuthFile
	return files.LoadAndWatch(ctx, "token-auth-file", path, func(context.Context, []byte) error {
		t, err := tokenfile.NewCSV(path)
		if err != nil {
			return err
		}
		h.tokens.set(t)
		h.resetTokenCache()
		return nil
	})
}

// webhookFile reads --authentication-token-webhook-config-file now and after each change.
func (h *chain) webhookFile(ctx context.Context, files *reload.Files) error {
	c := &h.config
	path := c.WebhookTokenAuthnConfigFile
	load := func(context.Context, []byte) error {
		client, err := webhookutil.LoadKubeconfig(path, c.CustomDial)
		if err != nil {
			return err
		}
		w, err := webhook.New(client, c.WebhookTokenAuthnVersion, c.APIAudiences, *c.WebhookRetryBackoff)
		if err != nil {
			return err
		}
		ttl := c.WebhookTokenAuthnCacheTTL
		h.webhook.set(tokencache.New(h.lookups.boundToCallers(w), false, ttl, ttl))
		h.resetTokenCache()
		return nil
	}
	return files.LoadAndWatch(ctx, "authentication-token-webhook-config-file", path, load)
}

// watchIssuerCA watches --oidc-ca-file. After a change, configure builds the configuration with the new file.
func (h *chain) watchIssuerCA(files *reload.Files, path string,
	configure func() (kubeauthenticator.Config, error)) error {
	return files.Watch("oidc-ca-file", path, func(ctx context.Context, _ []byte) error {
		next, err := configure()
		if err != nil {
			return err
		}
		updateCtx, cancel := context.WithTimeout(ctx, updateTimeout)
		defer cancel()
		if err := h.updateJWT(updateCtx, next.AuthenticationConfig); err != nil {
			return reload.Retryable(err)
		}
		h.resetTokenCache()
		return nil
	})
}

// tokenAdapter makes a request authenticator authenticate a token.
type tokenAdapter struct{ authenticator.Request }

// AuthenticateToken implements authenticator.Token. It rejects a token with a space, because a JWT has none and the
// Authorization header would truncate the token there.
func (t tokenAdapter) AuthenticateToken(ctx context.Context, token string) (*authenticator.Response, bool, error) {
	if strings.Contains(token, " ") {
		return nil, false, nil
	}
	resp, ok, err := t.AuthenticateRequest((&http.Request{
		URL:    &url.URL{},
		Header: http.Header{"Authorization": {"Bearer " + token}},
	}).WithContext(ctx))
	if err != nil && err.Error() == invalidBearerToken {
		return nil, false, nil
	}
	return resp, ok, err
}

// invalidBearerToken is the error of k8s.io/apiserver/pkg/authentication/request/bearertoken for an unknown token.
const invalidBearerToken = "invalid bearer token"

func instrument(name string, r authenticator.Request) authenticator.Request {
	return authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		resp, ok, err := r.AuthenticateRequest(req)
		recordAttempt(name, ok, err)
		return resp, ok, err
	})
}

func instrumentToken(name string, t authenticator.Token) authenticator.Token {
	return authenticator.TokenFunc(func(ctx context.Context, token string) (*authenticator.Response, bool, error) {
		resp, ok, err := t.AuthenticateToken(ctx, token)
		recordAttempt(name, ok, err)
		return resp, ok, err
	})
}

func recordAttempt(name string, ok bool, err error) {
	switch {
	case err != nil:
		attempts.WithLabelValues(name, "error").Inc()
	case ok:
		attempts.WithLabelValues(name, "success").Inc()
	}
}
